"""One device session: carries out what its kernel and its owner ask for, one thing at a time.

`DeviceState` has the state and its worker; this module decides when there is a worker. All changes
to a session happen under its lock, in one of two ways: `look` makes its own task reconcile it with
what the shared pages and the worker ask for, and the commands (`suspend`, `resume`) come from
requests.

Note [Looking]: a client rings after it wrote what it wants, and not again until the agent page's
bell has moved. So reconciling first moves the bell and then reads: a later write rings again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, replace
from typing import TypeVar

from kernelproxy.agent.checkpoint.auto_checkpoint import Automatic, Rule
from kernelproxy.agent.checkpoint.catalog import Checkpoints
from kernelproxy.agent.checkpoint.coordinator import Checkpointing
from kernelproxy.agent.checkpoint.history import Past, Runs
from kernelproxy.agent.devices.co_tenants import known_as
from kernelproxy.agent.devices.device_allocator import Answer, Room
from kernelproxy.agent.devices.memory_grants import Neighbour
from kernelproxy.agent.lease.lease import Turn
from kernelproxy.agent.process.hibernation import Hibernation
from kernelproxy.agent.process.image_dirs import ImageDirectories
from kernelproxy.agent.process.process_manager import NOT_SHARED, Tender
from kernelproxy.agent.session.commands import Verbs
from kernelproxy.agent.session.denied import Denial
from kernelproxy.agent.session.idle_timer import Idleness, waits
from kernelproxy.agent.session.kernel_connection import Attachment
from kernelproxy.agent.session.preferences import Wanted
from kernelproxy.agent.session.restore import Returning
from kernelproxy.agent.session.spill import Chilling
from kernelproxy.agent.session.states import State, check_transition
from kernelproxy.agent.session.suspend_hold import Hold
from kernelproxy.agent.settings import Settings
from kernelproxy.agent.spill.host_memory import HostMemory
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.migration import Migration
from kernelproxy.agent.state.shared_pages import Wish
from kernelproxy.agent.state.snapshot_scheduler import Upkeep
from kernelproxy.agent.status import session_status
from kernelproxy.agent.status.activity_recorder import Chronicle
from kernelproxy.agent.status.subscribers import Audience
from kernelproxy.agent.supervisor.fdstore import RECORD_VERSION, Deposited, Deposits
from kernelproxy.agent.workers.crash_policy import PAUSE_MIN
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.agent.workers.zygotes import Zygotes
from kernelproxy.common.errors import ControlError, InternalError, WorkerError
from kernelproxy.common.protocol import OpenSession
from kernelproxy.common.readable import moment
from kernelproxy.common.scheduler_api import Allowance, Arbiter, SessionDescription
from kernelproxy.common.shared_memory import Presence
from kernelproxy.common.units import exact_duration_text

log = logging.getLogger(__name__)
T = TypeVar("T")

_WITH_WORKER = {State.IDLE, State.RUNNING, State.RESTORING}
SETTLE_LOOK_SECONDS = 0.01


class Session:
    """A session from its opening until it is closed.

    Parameters
    ----------
    session_id : str
    request : OpenSession
    owner : int
        User id.
    room : Room
        Its device.
    state : DeviceState
        The session takes ownership.
    zygotes : Zygotes
    settings : Settings
    host : HostMemory
    checkpoints : Checkpoints
    images : ImageDirectories
    runs : Runs
    deposits : Deposits
    arbiter : Arbiter
    audience : Audience
    chronicle : Chronicle
    on_closed : callable
        Called with the session once everything is freed.
    """

    def __init__(
        self,
        session_id: str,
        request: OpenSession,
        owner: int,
        room: Room,
        state: DeviceState,
        zygotes: Zygotes,
        settings: Settings,
        host: HostMemory,
        checkpoints: Checkpoints,
        images: ImageDirectories,
        runs: Runs,
        deposits: Deposits,
        arbiter: Arbiter,
        audience: Audience,
        chronicle: Chronicle,
        on_closed: Callable[[Session], object],
    ) -> None:
        self.id, self.request = session_id, request
        self.name, self.kernel_id = request.name, request.kernel_id
        self.python, self.script, self.notebook = request.python, request.script, request.notebook
        self.owner, self.room = owner, room
        #: Name of its user, as policies spell it.
        self.user = request.user or session_status.user_name(owner)
        #: True if the daemon serves other users, too, and so must not trust the session's owner.
        self.shared = settings.system
        self.kernel = Attachment(self, zygotes)
        self.settings = settings
        #: Limits that the scheduler sets.
        self.allowance = Allowance()
        self.device_state = state
        state.whose = lambda: f"{self.user} {self.name}"
        state.deposit = self.deposit
        state.others_wait = self.others_wait
        self.wanted = Wanted(self)
        suspend_after, hibernate_after = waits(request, settings, Allowance())
        self.idleness = Idleness(self.device_state, suspend_after, self.wanted, self.look)
        self.upkeep = Upkeep(self.device_state, settings.log_budget, host.has, self.look)
        #: Cost of its last migration.
        self.migration: Migration | None = None
        self.state, self.reason, self.since = State.IDLE, session_status.UNUSED, time.monotonic()
        self.zygotes, self.host, self._deposits = zygotes, host, deposits
        self._on_closed, self._audience, self.chronicle = on_closed, audience, chronicle
        self._withdrawn = False  # nothing of it is persisted any more
        self.hold: Hold | None = None
        #: Why the last attempt to suspend it failed; "" if it did not fail.
        self.stuck = ""
        self._lock, self.claims, self._looking = asyncio.Lock(), 0, False
        self._looks, self.wishes = asyncio.Event(), asyncio.Event()
        self.left_queue: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._burying: asyncio.Task[None] | None = None  # ends the worker, when it has failed
        self.returning, self.denial = Returning(self), Denial(self)
        self.verbs, self.chilling = Verbs(self), Chilling(self)
        self.arbiter, self.turn = arbiter, Turn(self, arbiter)
        self.checkpointing = Checkpointing(self, checkpoints, images)
        #: Process manager of the kernel, while it is connected.
        self.tender: Tender | None = None
        self.hibernation = Hibernation(self, hibernate_after, images)
        if self.shared and hibernate_after > 0:
            self.hibernation.problem = NOT_SHARED
        self.past, self._runs = Past(self, checkpoints, runs), runs
        keep = max(1, request.checkpoint_keep)
        rule = Rule(request.checkpoint_every, request.checkpoint_cells, keep)
        self.automatic = Automatic(self, checkpoints, rule)
        self._attending = asyncio.create_task(self._attend(), name=f"session {session_id}")
        room.tenants[session_id] = self

    def terms(self) -> SessionDescription:
        """Return the session's description for the scheduler."""
        used = min(self.device_state.memory.client.memory_used, self.room.ledger.total)
        bound = self.request.device is not None
        pinned, tier = self.wanted.pinned, self.wanted.tier
        device = self.room.device.id
        return SessionDescription(
            self.id, self.name, self.owner, device, used, bound, self.user, pinned, tier
        )

    def allow(self, allowance: Allowance) -> None:
        """Apply new limits."""
        waited = waits(self.request, self.settings, allowance)
        self.idleness.timeout, self.hibernation.timeout = waited
        self.allowance = allowance
        self.host.cold.allow(self.user, allowance.disk)
        most = math.inf if allowance.device_memory is None else allowance.device_memory
        self.device_state.limit_memory(most)
        self.look()

    def changed(self) -> None:
        """Note that its user-visible state may have changed."""
        self._audience.note(self)

    # ---------------------------------------------------------------- outliving the agent

    def deposit(self) -> None:
        """Give the supervisor what `adopt` needs; see Note [Deposits]."""
        if self._withdrawn:
            return
        self.changed()
        state, fds = self.device_state.record()
        kernel, kernel_fds = self.kernel.record()
        hibernation, tender_fds = self.hibernation.record()
        record = {
            "version": RECORD_VERSION,
            "request": asdict(self.request),
            "owner": self.owner,
            "runs_as": asdict(self.zygotes.owner) if self.zygotes.owner else None,
            "device": self.room.device.id,
            "kernel": kernel,
            "hibernation": hibernation,
            "state": state,
            "is": str(self.state),
            "reason": self.reason,
            "since": self.since,
            "hold": asdict(self.hold) if self.hold else None,
            "automatic": self.automatic.record(),
            "fresh": self.past.fresh,
            "wanted": self.wanted.record(),
            "denied": self.denial.why,
        }
        self._deposits.put(Deposited(self.id, record, [*fds, *kernel_fds, *tender_fds]))

    def adopt(self, deposited: Deposited) -> None:
        """Recover the session of an agent that died.

        Raises
        ------
        ControlError
            If the session was about to be closed.
        StoreError
            If its state on disk cannot be used.
        """
        record, state, page = deposited.record, self.device_state, self.device_state.memory.agent
        was, failed = State(record["is"]), record["is"] == State.FAILED
        self.denial.why = record.get("denied", "")
        over = page.presence == Presence.ENDED and not failed and not self.denial.why
        if over and not state.disk.alone:
            raise ControlError("it was closed", "ended")
        if record["state"]["stored"]:
            state.disk.stored = self.host.cold.store().load(str(self.owner), self.id)
        self.hibernation.adopt(record["hibernation"], deposited.take("tender"))
        asleep = self.hibernation.asleep
        self.kernel.adopt(record["kernel"], deposited.take("watched"), asleep=asleep)
        self.hold = Hold(**record["hold"]) if record["hold"] else None
        self.automatic.adopt(record["automatic"])
        self.past.fresh = record["fresh"]
        if failed or was is State.SUSPENDED:
            self.state, self.reason, self.since = was, record["reason"], record["since"]
            ended = failed or page.presence == Presence.ENDED
            state.announce(Presence.ENDED if ended else Presence.ABSENT, self.reason)
        elif state.memory.client.head or page.memory_granted:
            self.returning.lost()
            grant = page.memory_granted
            if was is not State.QUEUED and not self.room.ledger.short(self.id, grant):
                self.room.ledger.hold(self.id, grant)  # before sessions that waited for memory
        self.wanted.adopt(record["wanted"])
        self.look()

    def begin_suspended(self, reason: str) -> None:
        """Begin as a session that was used and then suspended."""
        self.become(State.SUSPENDED, reason)
        self.deposit()

    # ---------------------------------------------------------------- reconciling

    def look(self) -> None:
        """Make its task reconcile the session."""
        self._looks.set()
        self.wishes.set()

    async def _attend(self) -> None:
        while True:
            await self._looks.wait()
            self._looks.clear()
            self._looking = True
            with contextlib.suppress(InternalError):  # then the session has failed, with a reason
                async with self.exclusive():
                    self._looking = False
                    await self._serve()
            self._looking = False
            self.changed()

    async def _serve(self) -> None:
        """Reconcile: do what the pages, the worker and the timers ask for."""
        state = self.device_state
        state.memory.agent.ring()  # Note [Looking]
        if self.state is State.FAILED:
            return
        self.denial.review()
        self._note_end_of_paused_cell()
        if state.disk.arrived:
            await state.disk.fetched()
        if state.worker is not None and (state.worker.broken or state.worker.corrupt is not None):
            await self.returning.bury()
        if self.idleness.seconds_left() <= 0:
            if self.automatic.before_rest():
                self.idleness.note_use()
            else:
                timeout = exact_duration_text(self.idleness.timeout)
                await self.suspend_if_idle(f"Not used for {timeout}")
        if (wish := state.wish) and wish.bytes > state.memory_limit:
            # Refuse it at once, without waiting for a worker.
            self.publish_grant(state.memory.agent.memory_granted, wish)
        if self.wants_worker():
            await self.returning.come_back()
        if state.worker is not None:
            await self.turn.start()
            if state.memory.agent.memory_granted > state.memory_limit:
                self.cut_grant(state.memory_limit)
            if not await self._grant():
                await self.returning.give_way()
        if state.worker is not None:
            rested = self.idleness.rested()
            await self.upkeep.tend(
                rested, lambda patient: self.meanwhile(state.save(patient=patient))
            )
            self.observe()
        await self.turn.rest()
        if self.hibernation.seconds_left() <= 0 and not self.automatic.before_hibernation():
            self.hibernation.begin()
        self.automatic.tend()
        self.idleness.set_timer()
        self.hibernation.set_timer()
        self.upkeep.set_timer(self.idleness.rested())
        if self.state is State.IDLE:
            self.room.changed()

    def wants_worker(self) -> bool:
        """Return True if there is work for a worker; end a hold that is over (Note [Holding])."""
        state = self.device_state
        if self.state is State.FAILED:
            return False
        wanted = self.returning.needed or not state.drained or state.wants_memory
        if self.hold is None or not wanted:
            return wanted
        if self.hold.is_over(state) or self.checkpointing.asked:
            self.hold = None
        return self.hold is None

    async def _grant(self) -> bool:
        """Answer the client's request for memory.

        Returns
        -------
        bool
            False if there is no room for it while the session and its neighbours are resident.
        """
        state = self.device_state
        wish = state.wish
        if wish is None:
            return True
        if state.memory.agent.memory_granted < wish.bytes <= state.memory_limit:
            if self.room.used_elsewhere(self) + wish.bytes > state.quota:
                return False  # it waits, or the scheduler evicts other sessions of its user
            answer = await self.room.reserve(self, wish.bytes, queued=False)
            if answer is not Answer.GRANTED:
                return answer is Answer.LATER
        self.publish_grant(self.room.ledger.of(self.id), wish)
        return True

    def publish_grant(self, grant: int, answered: Wish | None) -> None:
        """Publish the client's grant, and the request which that answers."""
        self.device_state.set_grant(grant, self.room.ledger.free, answered)

    async def meanwhile(self, work: Coroutine[None, None, T]) -> T:
        """Run work whose duration depends on the size of the state; grant memory meanwhile."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                wish = asyncio.create_task(self.wishes.wait())
                await asyncio.wait({task, wish}, return_when=asyncio.FIRST_COMPLETED)
                wish.cancel()
                if self.wishes.is_set():
                    self.wishes.clear()
                    self.device_state.memory.agent.ring()  # Note [Looking]
                    if self.wants_worker():
                        self.turn.ask()
                    await self.turn.start()
                    if not await self._grant():
                        self.device_state.hurry()
                        self._looks.set()  # reconcile afterwards: it lacks memory
        except BaseException:
            task.cancel()
            await asyncio.wait({task})
            raise
        return task.result()

    def let_go_on(self) -> None:
        """End a hold (see Note [Holding]), and a pause between two attempts to resume, because the
        user runs another cell.
        """
        if self.returning.obstacle:
            self.returning.hurry()
            self.look()
        if self.hold is None:
            return
        self.hold = None
        if self.state is State.SUSPENDED:
            self.become(State.SUSPENDED, f"Suspended. {session_status.way_back(self)}")
            self.deposit()
        self.look()

    def _note_end_of_paused_cell(self) -> None:
        """Update the reason once the cell has ended (as by an interrupt) that it was paused in."""
        hold, client = self.hold, self.device_state.memory.client
        if hold is None or not hold.in_cell or client.cells_running:
            return
        if self.state is State.SUSPENDED:
            self.hold = replace(hold, in_cell=False)
            why = f"Suspended by {hold.by}, {moment(hold.at)}."
            self.become(State.SUSPENDED, f"{why} {session_status.way_back(self)}")
            self.deposit()

    async def settle(self, seconds: float) -> None:
        """Wait until the log is drained, for at most so many seconds."""
        end = time.monotonic() + seconds
        while (
            self.state not in (State.SUSPENDED, State.FAILED)
            and not self.device_state.closed
            and not self.device_state.drained
            and time.monotonic() < end
        ):
            await asyncio.sleep(SETTLE_LOOK_SECONDS)  # there is no notification for a drained log

    # ---------------------------------------------------------------- suspending

    async def suspend_if_idle(self, why: str, *, pressed: bool = False) -> bool:
        """Suspend it, unless it is pinned or begins to work meanwhile; return True on success.

        `pressed`: others wait for that.
        """
        if self.wanted.pinned:
            return False
        try:
            # Without a lease nothing executes, even if the log has work.
            busy = self.turn.held
            if not await self.unload(unless_busy=busy, pressed=pressed):
                self.look()
                return False
        except ControlError as error:
            if error.message != self.stuck:
                log.warning("Session %s stays on its device: %s", self.id, error.message)
            self.stuck = error.message
            if not pressed:
                self.idleness.note_use()  # as below
            self.observe()
            return False
        except WorkerError as error:
            log.warning("Session %s could not be suspended: %s", self.id, error)
            self.idleness.note_use()  # try again after another full timeout
            return False
        self.suspended(f"{why}. {session_status.way_back(self)}")
        return True

    async def unload(self, *, unless_busy: bool, pressed: bool = False) -> bool:
        """End its worker, as `DeviceState.unload`, if its state fits into host memory.

        Raises
        ------
        ControlError
            ``quota``, if it does not fit; the worker continues.
        WorkerError
            As `DeviceState.unload`.
        """
        state = self.device_state
        count = state.dirty_bytes if state.worker is not None and not state.saved else 0
        async with self.host.admitted(self.chilling, count):
            return await state.unload(unless_busy=unless_busy, pressed=pressed)

    def suspended(self, reason: str) -> None:
        """Note that its worker is gone and its state is saved."""
        self.returning.needed = False
        self.become(State.SUSPENDED, reason)
        self.leave_device()
        self.look()  # something may have been appended before that was announced

    def leave_device(self) -> None:
        """Free its device memory for others: its worker is gone, and its state is saved."""
        state, self.stuck = self.device_state, ""
        if state.drained:
            # Nothing will be replayed, so it needs no more than its memory in use to resume.
            state.replay_grant = 0
            state.cut_grant(0)
            state.replay_grant = state.memory.agent.memory_granted
        self.returning.hurry()
        self.upkeep.cancel()
        state.announce(Presence.ABSENT)
        self.turn.suspended()
        self.arbiter.evicted(self.id, self.room.device.id)
        self.room.release(self)
        self.host.changed()

    # ---------------------------------------------------------------- making room for others

    @property
    def wants_turns(self) -> bool:
        """See `Tenant`."""
        return self.turn.wanted

    @property
    def memory_limit(self) -> int:
        """See `Tenant`."""
        return self.device_state.memory_limit

    @property
    def used(self) -> int:
        """See `Tenant`."""
        return min(self.device_state.memory.client.memory_used, self.room.ledger.of(self.id))

    @property
    def kept(self) -> int:
        """See `Tenant`."""
        if not self.wanted.pinned:
            return 0
        granted, state = self.room.ledger.of(self.id), self.device_state
        return min(granted, state.memory.client.memory_used) if state.drained else granted

    def as_neighbour(self) -> Neighbour | None:
        """See `Tenant`."""
        state = self.device_state
        if state.worker is None or state.worker.broken or self.claims or self.closing:
            return None
        granted = self.room.ledger.of(self.id)
        # While the log has work, executing it may need more than the client uses now.
        used = state.memory.client.memory_used if state.drained else granted
        stays = self.wanted.pinned or (self.turn.held and not state.idle)
        return Neighbour(self.id, granted, used, None if stays else self.idleness.active)

    @property
    def undecided(self) -> bool:
        """See `Tenant`."""
        return bool(
            self.claims
            and not self.closing
            and self.room.ledger.of(self.id)
            and not self.device_state.wants_memory
        )

    def cut_grant(self, grant: int) -> int:
        """See `Tenant`."""
        before = self.room.ledger.of(self.id)
        after = self.device_state.cut_grant(grant)
        self.room.ledger.hold(self.id, after)
        return before - after

    async def evict(self, device: str, reason: str) -> bool:
        """Suspend it if it is on `device` and does not execute; return True if it is suspended.

        False if it is on another device.
        """
        self.device_state.hurry()
        async with self.exclusive():
            if self.room.device.id != device:
                return False
            if self.device_state.worker is None:
                self.arbiter.evicted(self.id, self.room.device.id)
                return True
            return not self.turn.held and await self.suspend_if_idle(reason, pressed=True)

    async def suspend_for(self, other: str) -> bool:
        """See `Tenant`."""
        with contextlib.suppress(InternalError):
            async with self.exclusive():
                return await self.suspend_if_idle(
                    f"Made room for {known_as(self, self.room.tenants.get(other))}", pressed=True
                )
        return True  # it has failed, which freed its memory, too

    # ---------------------------------------------------------------- its state and its end

    def check_usable(self) -> None:
        """Raise ControlError if it has failed or is closing."""
        if self.state is State.FAILED or self.closing:
            raise ControlError(f"Session {self.id} has ended: {self.reason}", "ended")

    def observe(self) -> None:
        """Update the state from the pages: running, idle or queued."""
        with_worker = self.device_state.worker is not None
        if not with_worker or self.state not in _WITH_WORKER | {State.QUEUED}:
            return
        if self.turn.waiting and self.returning.blocked():
            self.become(
                State.QUEUED, self.returning.kept_out() or self.returning.why(self.turn.reason)
            )
        elif self.device_state.idle:
            self.become(State.IDLE, session_status.idle(self))
        elif self.turn.held or self.turn.waiting or not self.device_state.drained:
            self.stuck = ""  # nothing tries to suspend a session that works
            self.become(State.RUNNING, session_status.running(self))
        else:  # its cell continues without the device, which others may use
            self.become(State.IDLE, session_status.ELSEWHERE)

    def standing(self, *, asking: bool = False) -> tuple[State, str]:
        """Return its user-visible state, and the reason.

        Here, a session that has asked for a lease is always queued. Users see it as queued only
        once it is known that others have what it waits for.

        Parameters
        ----------
        asking : bool
            True if its own cell asks for the state, which does not count as work.
        """
        state = self.device_state
        if compiling := session_status.awaited_compilation(self):
            return State.PREPARING, f"{compiling}."
        if self.state is State.QUEUED and not self.returning.blocked():
            return (
                State.RESTORING,
                session_status.RESTORED if state.position else session_status.STARTS,
            )
        if asking and self.state is State.RUNNING and state.rests_but_for_cells(1):
            return State.IDLE, session_status.idle(self)
        return self.state, self.reason

    def become(self, state: State, reason: str) -> None:
        """Change state, if the table allows it."""
        check_transition(self.state, state)
        if (state, reason) != (self.state, self.reason):
            self.changed()
        before, self.state, self.reason = self.state, state, reason
        self.chronicle.became(self)
        if state is not before:
            self.since = time.monotonic()
            log.info("Session %s: %s, was %s: %s", self.id, state, before, reason)
            if not {state, before} <= _WITH_WORKER:
                self.deposit()
        if state is not State.QUEUED and self.left_queue is not None:
            self.left_queue.set_result(None)
            self.left_queue = None

    def fail(self, reason: str) -> None:
        """Fail it for good: its client raises the reason, and its device memory is freed."""
        state = self.device_state
        worker, state.worker = state.worker, None
        if worker is None:
            self.turn.close()
        else:
            self._burying = asyncio.create_task(self._end_failed(worker))
        self.room.leave_queue(self)
        self.room.release(self)
        self.become(State.FAILED, reason)
        self.device_state.announce(Presence.ENDED, reason)

    async def _end_failed(self, worker: Worker) -> None:
        """End its worker, then its lease: another session may execute once the worker is gone."""
        try:
            await worker.kill()
            worker.close()
        finally:
            self.turn.close()

    @property
    def closing(self) -> bool:
        """True if it is closing or closed."""
        return self._closing is not None

    def close(self, why: str, *, died: bool = False) -> asyncio.Task[None]:
        """Close it and free all it has. Idempotent.

        Parameters
        ----------
        why : str
        died : bool
            True if its kernel ended, as far as is known unexpectedly.
        """
        if self._closing is None:
            died = died and not self.script and not self.kernel.end_is_wanted
            self._runs.ended(self.id, died=died)
            log.info("Session %s closes: %s", self.id, why)
            self._closing = asyncio.create_task(self._close(why), name=f"close {self.id}")
            self.wishes.set()
        return self._closing

    async def _close(self, why: str) -> None:
        self.kernel.unwatch()
        self.idleness.cancel()
        self.upkeep.cancel()
        self.returning.close()
        if self.device_state.worker is not None:
            await self.device_state.worker.kill()  # its answers are not needed any more
        if self._burying is not None:
            await self._burying
        self.turn.close()
        if self.tender is not None:
            self.tender.close()
        await self.hibernation.close()
        self.checkpointing.give_up(f"Session {self.id} has ended: {why}")
        await self.automatic.close()
        tasks = [self._attending, *self.verbs.running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._lock:  # a neighbour may be suspending this session
            self.room.leave_queue(self)
            del self.room.tenants[self.id]
            self.device_state.announce(Presence.ENDED, why)
            stored = self.device_state.disk.stored
            self._withdrawn = True
            self._deposits.drop(self.id)
            self.chronicle.note_executed(self)
            await self.device_state.close()
            if stored is not None:
                await self.host.cold.forget(stored)
            self.host.forget(self.chilling)
            self.room.release(self)
        self._on_closed(self)

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold its lock, and count the waiters: see Note [Locks] in `devices.device_allocator`.

        An unexpected exception fails this session, and only this one. A lack of system resources
        does not: it is retried.
        """
        self.claims += 1
        if self._lock.locked():
            self.wishes.set()  # long work of the lock's holder may give way to us
        try:
            async with self._lock:
                yield
        except ControlError:
            raise
        except (OSError, MemoryError) as error:  # a lack of the machine, not the session's fault
            log.warning("Session %s tries again: %s", self.id, error)
            asyncio.get_running_loop().call_later(PAUSE_MIN, self.look)
            raise InternalError(f"{error}: try again.") from error
        except Exception as error:
            log.exception("Session %s failed", self.id)
            self.fail(f"Something is wrong with jupyter_sing itself: {error}")
            raise InternalError(str(error)) from error
        finally:
            self.claims -= 1
            if not self.claims:
                self.room.decided(self)
                self.host.decided(self.chilling)

    def others_wait(self) -> bool:
        """Return True if a caller waits for its lock, or another session for its device."""
        return self.awaited or self.arbiter.contended(self.id)

    @property
    def busy(self) -> bool:
        """True if its lock is held."""
        return self._lock.locked()

    @property
    def awaited(self) -> bool:
        """True if a task other than its own reconcile loop waits for its lock, or it is closing."""
        return self.closing or self.claims - self._looking > 1
