"""The lease of one session: requested when there is something to execute, and given back after.

Note [Leases]: a worker executes only with an open gate and a lease. The gate is closed and opened
under the session's lock, for work on its state. The scheduler gives and takes the lease at any
time, also while that lock is held: a snapshot of the state takes longer than other sessions may
have to wait for the device.

While a session has no lease, its client sees that nothing executes (`Presence`), and so rings for
the agent when it appends something.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kernelproxy.agent.lease.step_monitor import StepMonitor
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.scheduler_api import Arbiter
from kernelproxy.common.shared_memory import Presence

log = logging.getLogger(__name__)

#: A cell that computes elsewhere gives the device up after so many seconds if others wait for it.
REST_SECONDS = 0.1


class DeviceLease:
    """The lease of a session, or its request for one.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    idle : IdleTimer
    arbiter : Arbiter
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        idle: IdleTimer,
        arbiter: Arbiter,
    ) -> None:
        self._core, self._state, self._demand, self._idle = core, state, demand, idle
        self._arbiter = arbiter
        #: User-facing reason why it waits; "" until the scheduler gives one.
        self.reason = ""
        self.manner = ""  # user-facing sentence of the scheduler, how it executes
        self._token: int | None = None
        self._reserved: tuple[int, str] | None = None  # token of a lease on another device
        self._asked = self._started = self._closed = False
        self._taking: asyncio.Task[None] | None = None
        self._resting: int | None = None  # token that it gives back on its own
        self._leaving = False  # it gives its lease back because it has nothing to execute
        self._timer: asyncio.TimerHandle | None = None
        self.monitor = StepMonitor(core, state, arbiter)
        self._transfer: tuple[float, int] | None = None  # begin of the transfer, and its bytes

    @property
    def held(self) -> bool:
        """True if it may execute."""
        return self._token is not None and self._taking is None

    @property
    def scheduled(self) -> bool:
        """True if the scheduler gives and takes leases; False if all sessions may execute."""
        return not self._arbiter.keeps

    def others_wait(self) -> bool:
        """Return True if a caller waits for its lock, or another session for its device."""
        return self._core.awaited or self._arbiter.contended(self._core.id)

    @property
    def wanted(self) -> bool:
        """True if there is something to execute, as far as the scheduler knows."""
        return self._asked

    @property
    def waiting(self) -> bool:
        """True if it has requested a lease and not received it yet."""
        return self._asked and not self.held and not self._leaving

    def ask(self) -> None:
        """Request a lease, which may be granted within this call. Idempotent."""
        if self._asked or self._closed:
            return
        self._asked, self.reason = True, ""
        self._arbiter.wants(self._core.id)
        if not self.held:
            for each in self._core.allocator.tenants.values():
                each.request_reconcile()  # they may not need theirs any more

    def begin_transfer(self, *, needed: bool) -> None:
        """Note that it is granted a device; measure its transfer there, if one is `needed`.

        A session without a snapshot has nothing to transfer.
        """
        size = self.monitor.memory
        here = not needed or not self._state.position
        self._transfer = None if here else (time.monotonic(), size)

    def reserve(self, token: int, device: str) -> None:
        """Note that it is granted a device to which it must migrate first; then `grant` follows."""
        if not self._closed:
            self._reserved = (token, device)

    def is_reserved(self, token: int) -> bool:
        """Return True if it may still have the lease for which it migrates."""
        return self._reserved is not None and self._reserved[0] == token

    def withdraw(self, token: int) -> None:
        """Withdraw such a lease; the task that migrates it checks for that, and answers."""
        if self.is_reserved(token):
            self._reserved = None

    def grant(self, token: int) -> None:
        """Give it a lease, with which it executes from the next reconciliation on."""
        if self._closed:
            return
        self._asked, self._token, self._reserved, self._started = True, token, None, False
        self._state.lease = (token, True)
        self._core.request_reconcile()

    def cannot(self, why: str) -> None:
        """Give back a lease that it cannot use now, as there is no room for its memory. It
        continues to wait.
        """
        token = self._token
        if token is not None and self._taking is None:
            self._token = None
            self._state.lease = (token, False)
            self._arbiter.refused(self._core.id, token, why)
            self.left_device()

    def stand_back(self) -> None:
        """Withdraw its request, though there is something to execute; `ask` requests again.

        There is no worker. A lease that is being taken, or promised on another device, ends by
        itself.
        """
        if self._arbiter.keeps or self._closed or not self._asked:
            return
        if self._taking is not None or self._reserved is not None or self._resting is not None:
            return
        self._token, self._asked = None, False
        self._state.lease = (self._state.lease[0], False)
        self._arbiter.done(self._core.id)

    def preempt(self, token: int, within: float = 0.0) -> None:
        """Take its lease; a token that is not the present one has no effect.

        It may continue for `within` seconds, to the point where it uses least memory.
        """
        if token == self._resting:
            self._resting = None  # now another session waits for that
        elif token == self._token and self._taking is None:
            self._taking = asyncio.create_task(self._take(token, within))
        self.withdraw(token)

    def give_up(self) -> None:
        """End its lease, as its device failed; it continues to wait for one."""
        if self._token is not None and self._taking is None:
            self.preempt(self._token)

    async def start(self) -> None:
        """Let its worker, if there is one, use a new lease."""
        state, worker, token = self._state, self._state.worker, None
        if self.held and not self._started and worker is not None:
            token = self._token
        if token is None or worker is None:
            return
        self._started = True
        state.announce(Presence.PRESENT)  # from now on the client need not ring
        with contextlib.suppress(OSError):  # it is dying, which is handled elsewhere
            await worker.set_lease(token, given=True)
        self.monitor.begin()
        if self._transfer is not None:
            started_at, size = self._transfer
            seconds, self._transfer = time.monotonic() - started_at, None
            self._arbiter.switched(self._core.allocator.device.id, size, seconds)
        self._arbiter.started(self._core.id, token)

    async def _take(self, token: int, within: float) -> None:
        """Stop its worker, and notify the scheduler."""
        try:
            await self._stop(token, lambda: True, within)
        except Exception as error:  # it is not known whether it executes
            log.exception("Session %s: its turn could not be ended", self._core.id)
            self._taking = None
            self._core.fail(f"Something is wrong with jupyter_sing itself: {error}")
            return
        self._token = self._taking = None
        self._rate()
        self._arbiter.released(self._core.id, token)
        self._core.request_reconcile()

    async def _stop(self, token: int, wanted: Callable[[], bool], within: float = 0.0) -> None:
        state = self._state
        state.lease = (token, False)
        if state.worker is not None:
            await state.worker.take_lease(token, wanted, within)
        if not self._core.closing and state.memory.agent.presence == Presence.PRESENT:
            state.announce(Presence.ABSENT)  # reconciling will see what was appended before

    def _rate(self) -> None:
        """Report to the scheduler what it has used; it does not execute any more."""
        self.monitor.measure()
        self.monitor.end()

    async def rest(self) -> None:
        """Give the lease back if there is nothing to execute; the session's lock is held."""
        core, token = self._core, self._token
        if not self._asked or self._arbiter.keeps or self._taking is not None or self._closed:
            return
        if self._reserved is not None:
            return  # it reconciles again when it has arrived, or is refused
        if self._demand.wants_worker() or not self._over():
            if self.held and self._arbiter.contended(core.id):
                self._check_later()
            return
        if token is not None:
            self._token, self._leaving = None, True
            self._resting = token
            try:
                await self._stop(token, lambda: self._resting is None or self.others_wait())
            finally:
                self._resting, self._leaving = None, False
        if self._closed:
            return
        self._asked = False
        self._rate()
        self._arbiter.done(core.id)
        core.request_reconcile()  # something may have been appended before the client was notified

    def _over(self) -> bool:
        """Return True if it does nothing with the device, and probably will not for a while."""
        if self._state.worker is None or self._state.idle:
            return True
        return self._arbiter.contended(self._core.id) and self._idle.drained_for() >= REST_SECONDS

    def _check_later(self) -> None:
        """Reconcile later: there is no notification for a drained log, or for how long it is."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REST_SECONDS / 2, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._core.request_reconcile()

    def pause(self, *, over: bool = False) -> None:
        """Disable the lease while its worker is replaced by one on another device, which must not
        execute with it. `over`: the session belongs to that device now, so the lease ends.
        """
        if not self._arbiter.keeps:
            state = self._state
            state.lease = (state.lease[0], False)
            if over:
                self._end_taking()
                self._token = None
                if self._reserved and self._reserved[1] != self._core.allocator.device.id:
                    self._reserved = None  # another request has migrated it

    async def enable_again(self) -> None:
        """Enable the lease again, as the worker was not replaced."""
        state = self._state
        if self.held:
            state.lease = (state.lease[0], True)
            if state.worker is not None:
                with contextlib.suppress(OSError):  # it is dying, which is handled elsewhere
                    await state.worker.set_lease(*state.lease)

    def lost(self, why: str) -> None:
        """End any lease and request another one, as its worker died.

        `why`: a sentence, if the agent ended it.
        """
        if self._closed:
            return
        self._end_taking()
        self.monitor.end()
        self._token, self._reserved, self._asked, self.reason = None, None, True, ""
        self._state.lease = (self._state.lease[0], False)
        self._arbiter.lost(self._core.id, why)

    def left_device(self) -> None:
        """Notify the scheduler that the session has no memory on its device any more."""
        self._arbiter.evicted(self._core.id, self._core.allocator.device.id)

    def moved(self, *, resident: bool) -> None:
        """Notify the scheduler of the session's new device; `resident`: with a worker there."""
        self._arbiter.moved(self._core.id, self._core.allocator.device.id, resident=resident)

    def suspended(self) -> None:
        """End its lease, as it is off its device; it requests another one when it needs it.

        A session that waits for a lease continues to wait.
        """
        if self._token is None or self._arbiter.keeps or self._closed:
            return
        self._end_taking()
        self._state.lease = (self._token, False)
        self._token, self._asked = None, False
        self._rate()
        self._arbiter.done(self._core.id)

    def _end_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def close(self) -> None:
        """End the lease for good: the session will not execute any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end_taking()
        self.monitor.end()
        if self._timer is not None:
            self._timer.cancel()
        state = self._state
        self._token, self._reserved, state.lease = None, None, (state.lease[0], False)
        self._arbiter.closed(self._core.id)
