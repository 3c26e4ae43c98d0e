"""The lease of one session: asked for when there is something to execute, and given back after.

Note [Leases]: a worker executes with an open gate and a lease. The gate is closed and opened under
the session's lock, for what is done with its state. The lease comes and goes whenever the arbiter
likes, also while somebody has the lock: a snapshot of the state takes longer than a turn may wait.

While a session has no lease its client is told that there is nobody who executes (`Presence`), and
so rings for the agent when it appends something.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kernelproxy.agent.arbiter import Arbiter
from kernelproxy.oplog import Presence

if TYPE_CHECKING:
    from kernelproxy.agent.session import Session

#: A cell that computes elsewhere gives the device to who waits for it after so many seconds.
REST_SECONDS = 0.1


class Turn:
    """When a session may execute.

    Parameters
    ----------
    session : Session
    arbiter : Arbiter
    """

    def __init__(self, session: Session, arbiter: Arbiter) -> None:
        self._session, self._arbiter = session, arbiter
        #: Why it waits, for people.
        self.reason = "Waits for its turn."
        self._token: int | None = None
        self._asked = self._started = self._closed = False
        self._taking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._counted = 0.0  # seconds of execution that the arbiter was told of

    @property
    def held(self) -> bool:
        """Whether it may execute."""
        return self._token is not None and self._taking is None

    @property
    def waiting(self) -> bool:
        """Whether it has asked in vain so far."""
        return self._asked and not self.held

    def ask(self) -> None:
        """Want to execute; it may be granted within this call. Asking twice is no error."""
        if self._asked or self._closed:
            return
        self._asked = True
        self._arbiter.wants(self._session.id)
        if not self.held:
            for each in self._session.room.tenants.values():
                each.look()  # whether they still need theirs

    def grant(self, token: int) -> None:
        """It may execute from the next look on."""
        if self._closed:
            return
        self._asked, self._token, self._started = True, token, False
        self._session.device_state.lease = (token, True)
        self._session.look()

    def preempt(self, token: int) -> None:
        """It may execute no more; a token that is not the present one changes nothing."""
        if token == self._token and self._taking is None:
            self._taking = asyncio.create_task(self._take(token))

    async def start(self) -> None:
        """Let its worker, if there is one, make use of a lease that is new."""
        state, worker, token = self._session.device_state, self._session.device_state.worker, None
        if self.held and not self._started and worker is not None:
            token = self._token
        if token is None or worker is None:
            return
        self._started = True
        state.announce(Presence.PRESENT)  # from now on nobody needs to ring
        with contextlib.suppress(OSError):  # it is dying, which is noticed elsewhere
            await worker.set_lease(token, given=True)
        self._arbiter.started(self._session.id, token)

    async def _take(self, token: int) -> None:
        """Have its worker stop, and tell the arbiter."""
        await self._stop(token)
        self._token = self._taking = None
        self._measure()
        self._arbiter.released(self._session.id, token)
        self._session.look()

    async def _stop(self, token: int) -> None:
        state = self._session.device_state
        state.lease = (token, False)
        if state.worker is not None:
            await state.worker.take_lease(token)
        if not self._session.closing and state.memory.agent.presence == Presence.PRESENT:
            state.announce(Presence.ABSENT)  # what was appended before is seen by the next look

    def _measure(self) -> None:
        """Tell the arbiter what it has used."""
        state = self._session.device_state
        executed = state.busy_seconds
        used, self._counted = executed - self._counted, executed
        self._arbiter.measured(self._session.id, state.memory.client.memory_used, max(used, 0.0))

    async def rest(self) -> None:
        """Give the lease back if there is nothing to execute; its lock is held."""
        session, token = self._session, self._token
        if not self._asked or self._arbiter.keeps or self._taking is not None or self._closed:
            return
        if session.wants_worker() or not self._over():
            if self.held and self._arbiter.contended(session.id):
                self._look_later()
            return
        if token is not None:
            self._token = None
            await self._stop(token)
        if self._closed:
            return
        self._asked = False
        self._measure()
        self._arbiter.done(session.id)
        session.look()  # something may have been appended before the client was told

    def _over(self) -> bool:
        """Whether it does nothing with the device, and will not for a while."""
        session = self._session
        if session.device_state.worker is None or session.device_state.idle:
            return True
        return self._arbiter.contended(session.id) and session.idleness.dry() >= REST_SECONDS

    def _look_later(self) -> None:
        """Nobody tells when the log was executed, or for how long nothing was."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REST_SECONDS / 2, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._session.look()

    def lost(self) -> None:
        """Its worker died: whatever lease it had is over, and it wants another one."""
        if self._closed:
            return
        self._end_taking()
        self._token, self._asked = None, True
        self._session.device_state.lease = (self._session.device_state.lease[0], False)
        self._arbiter.lost(self._session.id)

    def _end_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def close(self) -> None:
        """It will execute nothing any more; doing it twice is no error."""
        if self._closed:
            return
        self._closed = True
        self._end_taking()
        if self._timer is not None:
            self._timer.cancel()
        self._token = None
        self._arbiter.closed(self._session.id)
