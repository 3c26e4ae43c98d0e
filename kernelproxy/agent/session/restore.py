"""Resuming a session: it gets a worker, once it has a lease and room on its device.

Note [Postponing]: a state that can be rebuilt is never thrown away. If no worker can be started (an
environment without torch, no descriptors, no memory), or if workers die again and again, the
session gives up its lease and its device memory, is queued with that reason, and retries after a
pause, which grows each time. A cell that its user runs, and `resume`, end the pause at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from kernelproxy.agent.devices.device_allocator import Answer
from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import Hold
from kernelproxy.agent.status import session_status
from kernelproxy.agent.workers.crash_policy import Verdict, pause
from kernelproxy.agent.workers.zygotes import Zygote
from kernelproxy.common.errors import ControlError, StoreError, WorkerDiedError, WorkerError
from kernelproxy.common.readable import device_name, turn
from kernelproxy.common.scheduler_api import SessionOutlook
from kernelproxy.common.shared_memory import Presence
from kernelproxy.common.units import bytes_text

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session

log = logging.getLogger(__name__)

START_ATTEMPTS_MAX = 10
START_REFUSALS_MAX = 3
#: Seconds for which it waits for room while it has a lease; then it gives the lease back.
ROOM_SECONDS = 1.0


class Returning:
    """Resumes one session when it must have a worker. Called under the session's lock.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        #: True if it must have a worker, even if the log is drained.
        self.needed = False
        self._died = False  # its worker died, and the next one is not there yet
        self._queued_since: float | None = None  # for room on its device
        self._why_died = ""  # if the agent ended the worker: the reason, a sentence
        self._vain = 0  # failed attempts since it last had a worker
        self._again: float | None = None  # when to try next, by the monotonic clock
        self._stamp = 0  # when a cell had last begun or ended at the previous attempt
        self._timer: asyncio.TimerHandle | None = None
        #: Why it waits for the next attempt and not for a device; "" if it does not.
        self.obstacle = ""

    def lost(self) -> None:
        """Note that its worker is gone, with all that was not saved."""
        self.needed = self._died = True

    async def come_back(self) -> None:
        """Resume it, let it wait for a lease, or deny it devices."""
        session = self._session
        if self._again is not None and session.device_state.worker is None:
            if time.monotonic() < self._again and self._stamp == self._cell_stamp():
                return session.turn.stand_back()
            self.hurry()
        if not session.turn.held and (why := session.arbiter.admits(session.user)):
            return await session.denial.deny(why)
        self.needed = self.needed or session.device_state.worker is None
        if session.shared and session.device_state.worker is None:
            # Before it holds anything that others wait for: this may take as long as it likes.
            with contextlib.suppress(WorkerError):  # reported below, at the next attempt
                await session.zygotes.get(session.python, session.kernel.torch_version)
        if session.device_state.wants_memory:
            session.turn.watch.measure()  # the scheduler also counts what it waits for
        session.turn.ask()
        if not session.turn.held:
            self._leave_queue()  # sessions with a lease come first
            if session.device_state.worker is None and not session.wanted.pinned:
                session.room.release(session)  # they may need the memory of its dead worker
            session.become(State.QUEUED, self.kept_out() or self.why(session.turn.reason))
        elif session.device_state.worker is None:
            await self._restore()
        return None

    async def give_way(self) -> None:
        """Suspend it, so that it waits off its device for memory that others use there.

        Note [Giving way]: a session that holds some memory while it waits for more keeps others
        from theirs, and they may do the same (hold and wait: a deadlock). So no session waits like
        that: if its request does not fit beside the sessions that execute, it leaves the device and
        queues for all that it needs. A request is refused only if it could not be granted even to
        that session alone.
        """
        session = self._session
        state = session.device_state
        session.turn.watch.measure()  # including what it needs now
        try:
            if not await session.unload(unless_busy=False, pressed=True):
                session.look()
                return
        except (ControlError, WorkerError) as error:
            log.warning("Session %s cannot wait for memory elsewhere: %s", session.id, error)
            session.publish_grant(session.room.ledger.of(session.id), state.wish)
            return
        self.needed = True
        session.leave_device()
        await self.come_back()

    async def _zygote(self) -> Zygote:
        """Return the zygote for its worker, with a time limit in the shared daemon.

        The session holds device memory meanwhile. Raises WorkerError.
        """
        session = self._session
        limit = session.settings.order_seconds if session.shared else None
        try:
            async with asyncio.timeout(limit):
                return await session.zygotes.get(session.python, session.kernel.torch_version)
        except TimeoutError as error:
            raise WorkerError(f"{session.python} does not start.") from error

    async def _restore(self) -> None:
        """Start its worker, or queue it for room on its device."""
        session = self._session
        state, room = session.device_state, session.room
        wish, need = state.wish, self._need()
        if state.disk.error is not None:
            return await self._strand(state.disk.error)
        self.needed = True
        if await room.reserve(session, need, queued=True) is not Answer.GRANTED:
            room.ledger.release(session.id)  # it may still hold some if a worker died
            session.turn.bring(away=False)  # from here on its duration is no measure of the device
            state.announce(Presence.ABSENT)
            kept = room.kept_from(session, need) or room.stuck(session)
            place = room.enqueue(session)
            self._queued_since = self._queued_since or time.monotonic()
            long = time.monotonic() - self._queued_since > ROOM_SECONDS
            device, size = device_name(room.device.id), bytes_text(need)
            if (kept or long) and not session.arbiter.keeps:  # others can use the lease
                self._leave_queue()
                why = kept or f"{device} has less than {size} free now."
                session.become(State.QUEUED, why)
                return session.turn.cannot(why)
            waits = f"Waiting for {size} on {device}. {turn(place, None)}"
            session.become(State.QUEUED, kept or waits)
            return None
        self._queued_since = None
        rebuilt = self._why_died or session_status.REBUILT
        session.become(State.RESTORING, rebuilt if self._died else session_status.RESTORED)
        self._died, self._why_died = False, ""
        session.publish_grant(room.ledger.of(session.id), wish)  # replaying may need all of it
        state.announce(Presence.PRESENT)  # from here on the client need not ring
        refusals = 0
        for attempt in range(1, START_ATTEMPTS_MAX + 1):
            try:
                state.disk.fetch(session.host.cold, session.look)
                await state.start_worker(await self._zygote(), session.look)
                break
            except StoreError as error:
                return await self._strand(error)
            except (WorkerError, OSError, MemoryError) as error:
                if state.disk.error is not None:
                    return await self._strand(state.disk.error)
                log.warning("Session %s: attempt %d to start: %s", session.id, attempt, error)
                refusals += not isinstance(error, WorkerDiedError)
                if attempt == START_ATTEMPTS_MAX or refusals == START_REFUSALS_MAX or self._vain:
                    why = str(error).rstrip(".") or "out of memory"
                    return self.postpone(f"The GPU process could not be started: {why}.")
        self.needed, self._vain = False, 0
        if not session.turn.held:  # any more
            state.announce(Presence.ABSENT)
        session.idleness.note_use()
        session.observe()
        return None

    def postpone(self, why: str, seconds: float | None = None) -> None:
        """Schedule the next attempt to resume; see Note [Postponing].

        Parameters
        ----------
        why : str
            A sentence.
        seconds : float, optional
            By default a pause that grows with each failed attempt.
        """
        session, state = self._session, self._session.device_state
        self._vain += 1
        seconds = pause(self._vain) if seconds is None else seconds
        self.needed = True
        self._again, self._stamp = time.monotonic() + seconds, self._cell_stamp()
        self._leave_queue()
        if not session.wanted.pinned:
            session.room.release(session)  # others may use it meanwhile
        state.announce(Presence.ABSENT)
        session.turn.stand_back()
        at = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        self.obstacle = f"{why} Nothing is lost. Next try at {at}, or when you run a cell."
        session.become(State.QUEUED, self.obstacle)
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, session.look)

    def stand_back(self) -> None:
        """Stop waiting for a worker that is not needed any more."""
        self.needed = False
        self._leave_queue()
        self._session.turn.stand_back()

    def hurry(self) -> None:
        """End the pause before the next attempt."""
        self._again, self.obstacle = None, ""
        self._cancel_timer()

    def close(self) -> None:
        """Cancel the next attempt: its session ends."""
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cell_stamp(self) -> int:
        return self._session.device_state.memory.client.cell_changed_ns

    def _leave_queue(self) -> None:
        """Leave the queue for room, so that others can have it."""
        self._queued_since = None
        self._session.room.leave_queue(self._session)

    def _need(self) -> int:
        """Return the bytes of device memory that it must have to execute."""
        session = self._session
        state = session.device_state
        wish, granted = state.wish, state.memory.agent.memory_granted
        wanted = wish.bytes if wish else state.memory.client.memory_used
        return min(max(granted, state.replay_grant, wanted), session.room.ledger.total)

    def outlook(self) -> SessionOutlook | None:
        """Return what it can expect while it waits for a lease or for room; None if unknown."""
        session = self._session
        if session.standing()[0] is not State.QUEUED:
            return None
        if place := session.room.place(session):
            return SessionOutlook(place, None, session.reason)
        found = session.arbiter.outlook(session.id)
        if found is None:
            return None
        kept = self.kept_out()
        seconds = None if kept else found.seconds
        return SessionOutlook(found.position, seconds, kept or self.why(found.reason))

    def kept_out(self) -> str:
        """Return who keeps memory that it needs even with a lease; "" if nothing keeps it out."""
        session = self._session
        if session.device_state.worker is not None:
            return ""
        bound = session.request.device is not None or session.wanted.pinned
        rooms = [session.room] if bound else session.room.rooms
        kept = {room: room.kept_from(session, self._need()) for room in rooms}
        return kept[session.room] if all(kept.values()) else ""

    def why(self, reason: str) -> str:
        """Return why it has no lease, after why it needs one if its worker died."""
        return f"{self._why_died} {reason or 'Waiting for its turn.'}".strip()

    def blocked(self) -> bool:
        """Return True if it is known by now to wait for what others have, or for a retry."""
        session = self._session
        return bool(
            self.obstacle or session.turn.reason or session.room.place(session) or self.kept_out()
        )

    async def _strand(self, error: StoreError) -> None:
        """Leave it on disk because its state cannot be read now, and notify its client."""
        session = self._session
        state = session.device_state
        state.drop_worker()
        with contextlib.suppress(StoreError):
            await state.disk.fetched()
        reason = f"The state is on disk and cannot be read: {error}"
        self.needed, self._died = False, False
        client = state.memory.client
        session.hold = Hold(False, client.cell_changed_ns or 1, client.head)
        session.become(State.SUSPENDED, reason)
        # The client must not wait in vain; the next cell, or `resume`, retries.
        state.announce(Presence.ENDED, reason)
        session.room.release(session)

    async def bury(self) -> None:
        """Clean up after a dead worker; `come_back` follows if the verdict allows."""
        session = self._session
        worker = session.device_state.worker
        if worker is not None and worker.hung:
            self._why_died = f"{worker.hung}. Stopped it and rebuilding its state."
            log.warning("Session %s: %s", session.id, self._why_died)
        verdict, corrupt = await session.device_state.bury()
        log.warning("Session %s: its worker died: %s", session.id, verdict.value)
        self.lost()
        session.turn.lost(self._why_died)
        what = self._why_died or session_status.REBUILT
        deaths = session.device_state.deaths
        if verdict is Verdict.SKIP and deaths.skip[-1] in deaths.starved:
            what = "Out of host memory: one operation was skipped. Everything else is rebuilt."
            log.warning("Session %s: %s", session.id, what)
        session.chronicle.happened(session, "lost", what)
        if corrupt is not None:
            session.fail(f"Its log is corrupt: {corrupt}")
        elif session.device_state.forgone:
            session.fail(f"The GPU process died. {session.upkeep.obstacle}")
        elif verdict is Verdict.FAIL:
            session.fail("The GPU process died several times, and replaying does not help.")
        elif seconds := session.device_state.deaths.pause:
            self.postpone("The GPU process was ended several times.", seconds)
