"""One device session: what its kernel and its owner ask for, done one thing at a time.

`DeviceState` has the state and its worker; this module decides when there is a worker. Whatever
changes a session happens under its lock, in one of two ways: `look` lets its task see what the
shared pages and the worker ask for, and the verbs (`suspend`, `resume`) come from requests.

Note [Looking]: a client rings after it wrote what it wants, and not again until the agent page's
bell has moved. So a look first moves the bell and then reads: what is written later rings again.

Note [Holding]: a session that was suspended for idleness comes back at the next append. One that
somebody suspended is *held*: what the running cell, a background thread or the garbage collector
appends does not bring it back; the next cell's first append does, and so does `resume`. If it was
suspended from inside its own cell, that cell brings it back too, but only when it waits for the
device: it must not wait for itself. A client that reports no cells comes back at its next append.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kernelproxy.agent import report
from kernelproxy.agent.channel import Channel, expect
from kernelproxy.agent.memory import Neighbour
from kernelproxy.agent.processes import ProcessWatch
from kernelproxy.agent.recovery import Verdict
from kernelproxy.agent.room import Room
from kernelproxy.agent.settings import Settings
from kernelproxy.agent.state import DeviceState
from kernelproxy.agent.states import State, check_transition
from kernelproxy.agent.zygotes import Zygotes
from kernelproxy.errors import ControlError, InternalError, ProtocolError, WorkerError
from kernelproxy.oplog import Presence, close_all
from kernelproxy.protocol import Attached, Bell, OpenSession

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
START_ATTEMPTS_MAX = 3
_WITH_WORKER = (State.IDLE, State.RUNNING, State.RESTORING)


@dataclass(frozen=True)
class Hold:
    """A suspension that an append alone does not end: see Note [Holding]."""

    by_itself: bool
    cell_stamp: int
    head: int


class Session:
    """A session from its opening to its close.

    Parameters
    ----------
    session_id : str
    request : OpenSession
    owner : int
        User id.
    room : Room
        Its device.
    zygotes : Zygotes
    settings : Settings
    on_closed : callable
        Called with it once everything is freed.
    """

    def __init__(
        self,
        session_id: str,
        request: OpenSession,
        owner: int,
        room: Room,
        zygotes: Zygotes,
        settings: Settings,
        on_closed: Callable[[Session], object],
    ) -> None:
        self.id, self.name, self.kernel_id = session_id, request.name, request.kernel_id
        self.python, self.script = request.python, request.script
        self.owner, self.room = owner, room
        self.torch_version: str | None = None
        self.kernel_pid: int | None = None
        wanted = request.idle_timeout
        self.idle_timeout = settings.idle_timeout if wanted is None else wanted
        self.device_state = DeviceState(session_id, room.device, settings)
        self.state, self.reason, self.since = State.IDLE, report.UNUSED, time.monotonic()
        self._zygotes, self._on_closed = zygotes, on_closed
        self._resumed_at = self.since
        self._hold: Hold | None = None
        self._must_run = False  # a worker is wanted though the log may ask for none
        self._died = False  # its worker did, and the next one is not there yet
        self._lock, self._claims = asyncio.Lock(), 0
        self._looks = asyncio.Event()
        self._left_queue: asyncio.Future[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._watch: ProcessWatch | None = None
        self._closing: asyncio.Task[None] | None = None
        self._verbs: set[asyncio.Task[dict[str, Any]]] = set()
        self._attending = asyncio.create_task(self._attend(), name=f"session {session_id}")
        room.tenants[session_id] = self

    # ---------------------------------------------------------------- its kernel

    def watch_opener(self, pid: int) -> None:
        """Close it if the process that opened it ends before a kernel has attached."""
        self._watch = ProcessWatch(pid, lambda: self.close("Its kernel never started."))

    async def serve_kernel(self, channel: Channel, torch_version: str) -> None:
        """Attach a kernel and hear its bells until it is gone; then the session is closed.

        Raises
        ------
        ControlError
            If it has a kernel already, or no worker could run for this one.
        """
        if self.kernel_pid is not None or self.closing:
            raise ControlError(
                f"Session {self.id} belongs to another process already.", "already-attached"
            )
        self.kernel_pid, _ = channel.peer()
        try:
            # Better said now, while the kernel can still run without us, than at its first cell.
            await self._zygotes.get(self.python, torch_version)
        except WorkerError as error:
            self.kernel_pid = None
            raise ControlError(str(error), "unavailable") from error
        if self.closing:
            raise ControlError(f"Session {self.id} was closed.", "ended")
        self.torch_version = torch_version
        if self._watch is not None:
            self._watch.close()
        # Its socket may live on in children that it forked.
        self._watch = ProcessWatch(self.kernel_pid, lambda: self.close("Its kernel ended."))
        fds = self.device_state.memory.kernel_fds()
        try:
            await channel.send(Attached(self.id), fds)
        finally:
            close_all(fds)
        try:
            while isinstance(expect(await channel.receive()), Bell):
                self.look()
            why = "Its kernel sent something else than bells."
        except ConnectionError:
            why = "Its kernel ended."
        except (OSError, ProtocolError) as error:
            why = f"Its kernel's connection broke: {error}"
        self.close(why)

    # ---------------------------------------------------------------- looking

    def look(self) -> None:
        """Ask its task to look at what could be done."""
        self._looks.set()

    async def _attend(self) -> None:
        while True:
            await self._looks.wait()
            self._looks.clear()
            with contextlib.suppress(InternalError):  # it has failed then, and says why
                async with self._exclusive():
                    await self._serve()

    async def _serve(self) -> None:
        """Do what pages, worker and clock ask for."""
        state = self.device_state
        state.memory.agent.ring()  # Note [Looking]
        if self.state is State.FAILED:
            return
        if state.worker is not None and (state.worker.broken or state.worker.corrupt is not None):
            await self._bury()
        if self._idle_seconds_left() <= 0:
            await self._suspend_if_idle(f"Not used for {report.duration(self.idle_timeout)}")
        if state.wants_memory and state.memory.client.memory_wanted > self.room.ledger.total:
            # Denied, without waiting for a worker.
            self._publish_grant(state.memory.agent.memory_granted)
        if state.worker is None and self._wants_worker():
            await self._restore()
        if state.worker is not None:
            await self._grant()
            await self._trim_log()
            self.observe()
        self._set_idle_timer()
        if self.state is State.IDLE:
            self.room.changed()

    def _wants_worker(self) -> bool:
        """Whether something must be executed now; ends a hold that is over (Note [Holding])."""
        state, client = self.device_state, self.device_state.memory.client
        if self.state is State.FAILED:
            return False
        wanted = self._must_run or not state.drained or state.wants_memory
        if self._hold is None or not wanted:
            return wanted
        hold, waits = self._hold, state.awaited or state.wants_memory
        if hold.cell_stamp:
            over = client.cells_running > 0 and client.cell_changed_ns != hold.cell_stamp
        else:
            over = client.head > hold.head or state.wants_memory
        if over or (hold.by_itself and waits):
            self._hold = None
        return self._hold is None

    async def _restore(self) -> None:
        """Bring it onto its device, or into the queue for it."""
        state, room = self.device_state, self.room
        self._must_run = True
        client, page = state.memory.client, state.memory.agent
        wish = client.memory_wanted if state.wants_memory else client.memory_used
        need = min(max(page.memory_granted, state.replay_grant, wish), room.ledger.total)
        if not await room.reserve(self, need, queued=True):
            room.ledger.release(self.id)  # held still if a worker died
            place = room.enqueue(self)
            state.announce(Presence.ABSENT)
            self._become(
                State.QUEUED,
                f"Waits for {report.size(need)} on {room.device.id} (place {place} in the queue): "
                "resumes when its neighbours are idle or leave.",
            )
            return None
        self._become(State.RESTORING, report.REBUILT if self._died else report.RESTORED)
        self._died = False
        self._publish_grant(room.ledger.of(self.id))  # replaying may need all of it
        state.announce(Presence.PRESENT)  # from now on nobody needs to ring
        for attempt in range(1, START_ATTEMPTS_MAX + 1):
            try:
                zygote = await self._zygotes.get(self.python, self.torch_version)
                await state.start_worker(zygote, self.look)
                break
            except WorkerError as error:
                log.warning("Session %s: attempt %d to start: %s", self.id, attempt, error)
                if attempt == START_ATTEMPTS_MAX:
                    return self._fail(f"Its device process could not be started: {error}")
        self._must_run, self._resumed_at = False, time.monotonic()
        self.observe()
        return None

    async def _grant(self) -> None:
        """Answer the client's wish for memory."""
        state = self.device_state
        if not state.wants_memory:
            return
        wanted = state.memory.client.memory_wanted
        if state.memory.agent.memory_granted < wanted <= self.room.ledger.total:
            await self.room.reserve(self, wanted, queued=False)
        self._publish_grant(self.room.ledger.of(self.id))

    def _publish_grant(self, grant: int) -> None:
        """Tell the client its grant, which is also the answer to what it wished."""
        self.device_state.set_grant(grant, self.room.ledger.free)

    async def _trim_log(self) -> None:
        """Take a snapshot if the log after the last one is longer than its budget."""
        state = self.device_state
        page = state.memory.agent
        if state.memory.client.head - page.retained <= page.log_budget:
            return
        try:
            await state.save()
        except WorkerError as error:
            log.warning("Session %s: no snapshot: %s", self.id, error)
            # A client whose log is full waits for this one and does not ring again.
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.look)

    async def _bury(self) -> None:
        """Take leave of a dead worker; `_restore` follows if the verdict allows."""
        verdict, corrupt = await self.device_state.bury()
        log.warning("Session %s: its worker died: %s", self.id, verdict.value)
        self._must_run = self._died = True
        if corrupt is not None:
            self._fail(f"Its log is corrupt: {corrupt}")
        elif verdict is Verdict.FAIL:
            self._fail("Its device process died again and again, and replaying does not help.")

    # ---------------------------------------------------------------- idleness

    @property
    def active(self) -> float:
        """Moment of its last use, in seconds of the monotonic clock."""
        return min(time.monotonic(), max(self._resumed_at, self.device_state.active_ns / 1e9))

    def _idle_seconds_left(self) -> float:
        """Seconds after which it is to be suspended, as it looks now."""
        if self.device_state.worker is None or self.idle_timeout <= 0:
            return float("inf")
        if not self.device_state.idle:
            return self.idle_timeout
        return self.active + self.idle_timeout - time.monotonic()

    def _set_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        left = self._idle_seconds_left()
        if left != float("inf"):
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(max(left, 0.001), self.look)

    async def _suspend_if_idle(self, why: str) -> bool:
        """Suspend it, unless it begins to work meanwhile; return whether it is suspended."""
        try:
            if not await self.device_state.unload(unless_busy=True):
                self.look()
                return False
        except WorkerError as error:
            log.warning("Session %s could not be suspended: %s", self.id, error)
            self._resumed_at = time.monotonic()  # try again when it was idle for as long again
            return False
        self._suspended(f"{why}: {report.way_back(self.script, held=False)}")
        return True

    def _suspended(self, reason: str) -> None:
        """Take note that its worker is gone and its state is saved."""
        state = self.device_state
        if state.drained:
            # Nothing will be replayed, so what it has in use is all it needs to come back.
            state.replay_grant = 0
            state.cut_grant(0)
            state.replay_grant = state.memory.agent.memory_granted
        self._must_run = False
        self._become(State.SUSPENDED, reason)
        state.announce(Presence.ABSENT)
        self.room.release(self)
        self.look()  # something may have been appended before that was announced

    # ---------------------------------------------------------------- making room for others

    def as_neighbour(self) -> Neighbour | None:
        """See `Tenant`."""
        state = self.device_state
        if state.worker is None or state.worker.broken or self._claims or self.closing:
            return None
        granted = self.room.ledger.of(self.id)
        # With work in the log, what the client uses by now is not what executing it may need.
        used = state.memory.client.memory_used if state.drained else granted
        return Neighbour(self.id, granted, used, self.active if state.idle else None)

    def cut_grant(self, grant: int) -> int:
        """See `Tenant`."""
        before = self.room.ledger.of(self.id)
        after = self.device_state.cut_grant(grant)
        self.room.ledger.hold(self.id, after)
        return before - after

    async def suspend_for(self, other: str) -> bool:
        """See `Tenant`."""
        with contextlib.suppress(InternalError):
            async with self._exclusive():
                return await self._suspend_if_idle(f"Made room for session {other}")
        return True  # it has failed, and that made room, too

    # ---------------------------------------------------------------- verbs

    async def suspend(self, why: str, by: int) -> dict[str, Any]:
        """Suspend it on request, whatever it does; returns when its worker is gone.

        A running cell goes on until it needs the device, and then waits; see Note [Holding].

        Parameters
        ----------
        why : str
            Who or what suspends it, as a clause; may be empty.
        by : int
            Process id of who asks.

        Returns
        -------
        dict
            The session as it is then.

        Raises
        ------
        ControlError
            If the session has ended, or its state cannot be saved.
        """
        return await self._as_verb(self._suspend(why.rstrip(". ") or "Suspended on request", by))

    async def _suspend(self, why: str, by: int) -> dict[str, Any]:
        self.device_state.hurry()
        async with self._exclusive():
            self._check_usable()
            client = self.device_state.memory.client
            hold = Hold(by == self.kernel_pid, client.cell_changed_ns, client.head)
            try:
                await self.device_state.unload(unless_busy=False)
            except WorkerError as error:
                raise ControlError(f"Its state could not be saved: {error}", "failed") from error
            self.room.leave_queue(self)
            self._hold = hold
            self._suspended(f"{why}: {report.way_back(self.script, held=True)}")
            return report.describe_session(self)

    async def resume(self) -> dict[str, Any]:
        """Bring it back; returns when it is there, having waited for room if need be.

        Returns
        -------
        dict
            The session as it is then.

        Raises
        ------
        ControlError
            If the session has ended or ends.
        """
        return await self._as_verb(self._resume())

    async def _resume(self) -> dict[str, Any]:
        self.device_state.hurry()
        async with self._exclusive():
            self._check_usable()
            self._hold = None
            if self.device_state.worker is None:
                await self._restore()
            self.look()
        while self.state is State.QUEUED:
            self._left_queue = self._left_queue or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._left_queue)
        self._check_usable()
        return report.describe_session(self)

    async def _as_verb(self, work: Coroutine[None, None, dict[str, Any]]) -> dict[str, Any]:
        """Run a verb so that closing the session ends it."""
        task = asyncio.create_task(work)
        self._verbs.add(task)
        task.add_done_callback(self._verbs.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self.closing:
                raise
            raise ControlError(f"Session {self.id} was closed.", "ended") from None

    def _check_usable(self) -> None:
        if self.state is State.FAILED or self.closing:
            raise ControlError(f"Session {self.id} has ended: {self.reason}", "ended")

    # ---------------------------------------------------------------- its state and its end

    def observe(self) -> None:
        """Tell running from idle by the pages."""
        if self.device_state.worker is None or self.state not in _WITH_WORKER:
            return
        if not self.device_state.idle:
            self._become(State.RUNNING, report.RUNNING)
        elif self.idle_timeout > 0:
            after = report.duration(self.idle_timeout)
            self._become(State.IDLE, f"Nothing to do: is suspended after {after} without use.")
        else:
            self._become(State.IDLE, report.EVER_IDLE)

    def _become(self, state: State, reason: str) -> None:
        """Change state, as the table allows."""
        check_transition(self.state, state)
        if state is not self.state:
            self.since = time.monotonic()
            log.info("Session %s: %s, was %s: %s", self.id, state, self.state, reason)
        self.state, self.reason = state, reason
        if state is not State.QUEUED and self._left_queue is not None:
            self._left_queue.set_result(None)
            self._left_queue = None

    def _fail(self, reason: str) -> None:
        """End it for good: its client raises the reason, and its device memory is free."""
        self.device_state.drop_worker()
        self.room.leave_queue(self)
        self.room.release(self)
        self._become(State.FAILED, reason)
        self.device_state.announce(Presence.ENDED, reason)

    @property
    def closing(self) -> bool:
        """Whether its end has begun."""
        return self._closing is not None

    def close(self, why: str) -> asyncio.Task[None]:
        """End it and free all it has; doing it twice is no error."""
        if self._closing is None:
            log.info("Session %s closes: %s", self.id, why)
            self._closing = asyncio.create_task(self._close(why), name=f"close {self.id}")
        return self._closing

    async def _close(self, why: str) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self.device_state.worker is not None:
            await self.device_state.worker.kill()  # nobody waits for its answers any more
        tasks = [self._attending, *self._verbs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._lock:  # a neighbour may be suspending us
            self.room.leave_queue(self)
            del self.room.tenants[self.id]
            self.device_state.announce(Presence.ENDED, why)
            await self.device_state.close()
            self.room.release(self)
        self._on_closed(self)

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Hold its lock, and count who wants it: see Note [Locks] in `room`.

        What nobody expected ends this session, and only this one.
        """
        self._claims += 1
        try:
            async with self._lock:
                yield
        except ControlError:
            raise
        except Exception as error:
            log.exception("Session %s failed", self.id)
            self._fail(f"Something is wrong with jupyter_sing itself: {error}")
            raise InternalError(str(error)) from error
        finally:
            self._claims -= 1
