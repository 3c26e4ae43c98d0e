"""One device session: assembles its parts, reconciles them, and closes them.

Each part takes by constructor what it uses, and imports only folders below its own. This module is
above all of them: what the parts demand of the whole session (`SessionHooks`), it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from kernelproxy.agent.checkpoint.auto_checkpoint import AutoCheckpoint, AutoCheckpointRule
from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog
from kernelproxy.agent.checkpoint.checkpoint_maker import CheckpointMaker
from kernelproxy.agent.checkpoint.checkpoint_requests import CheckpointRequests
from kernelproxy.agent.checkpoint.history import CheckpointHistory, KernelRuns
from kernelproxy.agent.checkpoint.process_saver import ProcessSaver
from kernelproxy.agent.children.child_saver import ChildSaver
from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.lifecycle.commands import Commands
from kernelproxy.agent.process.hibernation import Hibernation
from kernelproxy.agent.process.image_dirs import ImageDirs
from kernelproxy.agent.process.process_manager import ProcessManagerSlot
from kernelproxy.agent.residency.denial import Denial
from kernelproxy.agent.residency.memory_requests import MemoryRequests
from kernelproxy.agent.residency.migrate import Migrator
from kernelproxy.agent.residency.observed_state import ObservedState
from kernelproxy.agent.residency.restore import Restorer
from kernelproxy.agent.residency.seat_move import SeatMove
from kernelproxy.agent.residency.spill import Spiller
from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.residency.tenant import SessionTenant
from kernelproxy.agent.residency.waiting import WaitReasons
from kernelproxy.agent.residency.worker_loss import WorkerLoss
from kernelproxy.agent.residency.worker_sources import WorkerSources
from kernelproxy.agent.residency.worker_start import WorkerStarter
from kernelproxy.agent.session.core import Identity, SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.idle_timer import IdleTimer, waits
from kernelproxy.agent.session.job import JobMembership
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.session.preferences import Preferences
from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import SuspendHold
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill.host_memory import HostMemory
from kernelproxy.agent.state.context_pool import ContextPool
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.snapshot_scheduler import SnapshotScheduler
from kernelproxy.agent.supervisor.fdstore import RECORD_VERSION, FdStore, PersistedSession
from kernelproxy.agent.workers.seats import Seats
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.agent.workers.zygotes import Zygotes
from kernelproxy.common.errors import ControlError, InternalError
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.scheduler_api import Allowance, Arbiter
from kernelproxy.common.shared_memory import Presence
from kernelproxy.common.units import exact_duration_text

log = logging.getLogger(__name__)

SETTLE_POLL_SECONDS = 0.01


class SessionObserver(Protocol):
    """Receiver of the changes of sessions, for subscribers and the record of the last day."""

    def changed(self, session: Session) -> None:
        """Note that its user-visible state may have changed."""

    def state_changed(self, session: Session) -> None:
        """Record that it is in another state, or on another device."""

    def happened(self, session: Session, kind: str, text: str) -> None:
        """Record an event."""

    def executed(self, session: Session) -> None:
        """Record how long its workers have executed."""

    def describe(self, session: Session) -> SessionView:
        """Return its description for users."""


@dataclass(frozen=True)
class HostServices:
    """The parts of a daemon that all its sessions share.

    Parameters
    ----------
    settings : AgentSettings
    host : HostMemory
    checkpoints : CheckpointCatalog
    images : ImageDirs
    runs : KernelRuns
    fdstore : FdStore
    arbiter : Arbiter
    observer : SessionObserver
    contexts : mapping of str to ContextPool
    seats : Seats
    """

    settings: AgentSettings
    host: HostMemory
    checkpoints: CheckpointCatalog
    images: ImageDirs
    runs: KernelRuns
    fdstore: FdStore
    arbiter: Arbiter
    observer: SessionObserver
    contexts: Mapping[str, ContextPool]
    seats: Seats


class Session:
    """A session from its opening until it is closed.

    Parameters
    ----------
    identity : Identity
    allocator : DeviceAllocator
        Its device.
    state : DeviceState
        The session takes ownership.
    zygotes : Zygotes
    services : HostServices
    on_closed : callable
        Called with the session once everything is freed.
    """

    def __init__(
        self,
        identity: Identity,
        allocator: DeviceAllocator,
        state: DeviceState,
        zygotes: Zygotes,
        services: HostServices,
        on_closed: Callable[[Session], object],
    ) -> None:
        self.id, self._services, self._on_closed = identity.id, services, on_closed
        self.device_state, self.zygotes = state, zygotes
        arbiter, request, host = services.arbiter, identity.request, services.host
        #: Limits that the scheduler sets.
        self.allowance = Allowance()
        self.core = core = SessionCore(identity, allocator, self)
        self.demand = demand = WorkerDemand(core, state)
        self.preferences = Preferences(core, state, arbiter)
        self.membership = membership = JobMembership(core, arbiter)
        settings = services.settings
        self.idle = idle = IdleTimer(core, state, waits(request, settings, self.allowance))
        self.kernel = kernel = KernelConnection(core, state, idle, zygotes, self)
        self.snapshots = snapshots = SnapshotScheduler(
            state, settings.log_budget, host.has, core.request_reconcile
        )
        self.lease = lease = DeviceLease(core, state, demand, idle, arbiter)
        self.waiting = waiting = WaitReasons(core, state, demand, lease, arbiter)
        self.observed = observed = ObservedState(core, state, lease, waiting, idle, zygotes)
        self.memory = memory = MemoryRequests(core, state, demand, lease)
        self.spiller = spiller = Spiller(core, state, demand, idle, kernel, host)
        self.suspender = suspender = Suspender(
            core, state, demand, lease, idle, spiller, observed, snapshots
        )
        self.denial = denial = Denial(core, state, demand, suspender, arbiter)
        sources = WorkerSources(
            core, state, kernel, membership, zygotes, settings, services.contexts, services.seats
        )
        starter = WorkerStarter(core, state, idle, sources, host.cold)
        self._restorer = restorer = Restorer(
            core, state, demand, lease, waiting, observed, starter, denial
        )
        self._loss = WorkerLoss(core, state, demand, lease, memory, suspender, restorer, snapshots)
        self._seat_move = SeatMove(core, state, lease, sources, suspender)
        self.migrator = Migrator(core, state, lease, memory, sources)
        self.tenant = SessionTenant(core, state, lease, idle, memory, suspender, observed)
        core.tenant = self.tenant
        self.managers = ProcessManagerSlot(core)
        self.hibernation = Hibernation(
            core, state, kernel, self.managers, suspender, spiller, idle, services.images
        )
        self.managers.listener = self.hibernation
        checkpoints = services.checkpoints
        self.history = CheckpointHistory(core, checkpoints, services.runs)
        self.requests = CheckpointRequests(
            core, kernel, self.hibernation, checkpoints, self.history
        )
        self.automatic = AutoCheckpoint(
            core, state, kernel, self.requests, self.history, checkpoints,
            AutoCheckpointRule.of(request),
        )  # fmt: skip
        self.child = ChildSaver(core, state, kernel, memory, membership)
        self.saver = ProcessSaver(core, state, kernel, self.managers, services.images, membership)
        self.maker = CheckpointMaker(
            core, state, memory, self.saver, checkpoints, self.requests, self.automatic
        )
        self.commands = Commands(
            core, state, demand, suspender, restorer, self.migrator, self.hibernation,
            lambda: services.observer.describe(self),
        )  # fmt: skip
        state.whose = lambda: f"{core.user} {core.name}"
        state.persist, state.others_wait = self.persist, lease.others_wait
        self._withdrawn = False  # nothing of it is persisted any more
        self._closing: asyncio.Task[None] | None = None
        self._burying: asyncio.Task[None] | None = None  # ends the worker, when it has failed
        self._reconciling = asyncio.create_task(
            self._reconcile_loop(), name=f"session {identity.id}"
        )
        allocator.tenants[identity.id] = self.tenant

    def allow(self, allowance: Allowance) -> None:
        """Apply new limits."""
        idle = self.idle
        timeouts = waits(self.core.request, self._services.settings, allowance)
        idle.suspend_after, idle.hibernate_after = timeouts
        self.allowance = allowance
        self._services.host.cold.allow(self.core.user, allowance.disk)
        most = math.inf if allowance.device_memory is None else allowance.device_memory
        self.device_state.limit_memory(most)
        self.core.request_reconcile()

    # ---------------------------------------------------------------- reconciling

    async def _reconcile_loop(self) -> None:
        core = self.core
        while True:
            await core.reconcile_due.wait()
            core.reconcile_due.clear()
            core.reconciler_waits = True
            with contextlib.suppress(InternalError):  # then the session has failed, with a reason
                async with core.exclusive():
                    core.reconciler_waits = False
                    await self._reconcile()
            core.reconciler_waits = False
            self.changed()

    async def _reconcile(self) -> None:
        """Do what the pages, the worker and the timers ask for."""
        state, core, idle = self.device_state, self.core, self.idle
        state.memory.agent.ring()  # Note [Reconciling]
        if core.state is State.FAILED:
            return
        self.denial.review()
        self.suspender.note_end_of_paused_cell()
        if state.disk.arrived:
            await state.disk.fetched()
        if state.worker is not None and (state.worker.broken or state.worker.corrupt is not None):
            await self._loss.reap_worker()
        if idle.seconds_left() <= 0:
            if self.automatic.before_rest():
                idle.note_use()
            else:
                timeout = exact_duration_text(idle.suspend_after)
                await self.suspender.suspend_if_idle(f"Not used for {timeout}")
        self.memory.refuse_impossible()
        if self.demand.wants_worker():
            await self._restorer.restore()
        if state.worker is not None:
            await self.lease.start()
            self.memory.cut_to_limit()
            if not await self.memory.answer():
                await self._loss.give_way()
        if state.worker is not None:
            rested = idle.idle_for()
            await self.snapshots.take_due(
                rested, lambda patient: self.memory.run_granting(state.save(patient=patient))
            )
            self.observed.update()
        await self.lease.rest()
        await self._seat_move.take_due()
        if self.hibernation.seconds_left() <= 0 and not self.automatic.before_hibernation():
            self.hibernation.begin()
        self.automatic.checkpoint_if_due()
        idle.set_timer()
        self.hibernation.set_timer()
        self.snapshots.set_timer(idle.idle_for())
        self.observed.set_timer()
        if core.state is State.IDLE:
            core.allocator.changed()

    async def settle(self, seconds: float) -> None:
        """Wait until the log is drained, for at most so many seconds."""
        end = time.monotonic() + seconds
        while (
            self.core.state not in (State.SUSPENDED, State.FAILED)
            and not self.device_state.closed
            and not self.device_state.drained
            and time.monotonic() < end
        ):
            await asyncio.sleep(SETTLE_POLL_SECONDS)  # there is no notification for a drained log

    # ---------------------------------------------------------------- its kernel (KernelListener)

    def kernel_joined(self) -> None:
        """See `KernelListener`."""
        self.hibernation.consider()

    def kernel_ended(self) -> None:
        """See `KernelListener`."""
        self.hibernation.consider()

    def cells_ended(self) -> None:
        """See `KernelListener`."""
        self.automatic.checkpoint_if_due()

    def cell_asked(self) -> None:
        """End a hold (see Note [Holding]), and a pause between two attempts to resume, because the
        user runs another cell.
        """
        core, demand = self.core, self.demand
        if demand.obstacle:
            demand.expedite()
            core.request_reconcile()
        if demand.hold is None:
            return
        demand.hold = None
        if core.state is State.SUSPENDED:
            core.set_state(State.SUSPENDED, f"Suspended. {self.suspender.way_back()}")
            self.persist()
        core.request_reconcile()

    # ---------------------------------------------------------------- the whole (SessionHooks)

    def changed(self) -> None:
        """See `SessionHooks`."""
        self._services.observer.changed(self)

    def state_changed(self) -> None:
        """See `SessionHooks`."""
        self._services.observer.state_changed(self)

    def happened(self, kind: str, text: str) -> None:
        """See `SessionHooks`."""
        self._services.observer.happened(self, kind, text)

    def unlocked(self) -> None:
        """See `SessionHooks`."""
        self.core.allocator.decided(self.tenant)
        self._services.host.decided(self.spiller)

    # ---------------------------------------------------------------- outliving the agent

    def persist(self) -> None:
        """Give the supervisor what `recover` needs; see Note [Persisting]."""
        if self._withdrawn:
            return
        self.changed()
        core, owner = self.core, self.zygotes.owner
        state, fds = self.device_state.record()
        kernel, kernel_fds = self.kernel.record()
        hibernation, manager_fds = self.hibernation.record()
        record = {
            "version": RECORD_VERSION,
            "request": asdict(core.request),
            "owner": core.owner,
            "runs_as": asdict(owner) if owner else None,
            "device": core.allocator.device.id,
            "kernel": kernel,
            "hibernation": hibernation,
            "state": state,
            "is": str(core.state),
            "reason": core.reason,
            "since": core.since,
            "hold": asdict(self.demand.hold) if self.demand.hold else None,
            "automatic": self.automatic.record(),
            "fresh": self.history.fresh,
            "wanted": self.preferences.record(),
            "denied": self.denial.why,
            "job": self.membership.record(),
        }
        self._services.fdstore.put(
            PersistedSession(self.id, record, [*fds, *kernel_fds, *manager_fds])
        )

    def recover(self, persisted: PersistedSession) -> None:
        """Recover the session of an agent that died.

        Raises
        ------
        ControlError
            If the session was about to be closed.
        StoreError
            If its state on disk cannot be used.
        """
        record, state, page = persisted.record, self.device_state, self.device_state.memory.agent
        core = self.core
        was, failed = State(record["is"]), record["is"] == State.FAILED
        self.denial.why = record.get("denied", "")
        over = page.presence == Presence.ENDED and not failed and not self.denial.why
        if over and not state.disk.alone:
            raise ControlError("it was closed", "ended")
        if record["state"]["stored"]:
            store = self._services.host.cold.store()
            state.disk.stored = store.load(str(core.owner), self.id)
        self.hibernation.recover(record["hibernation"], persisted.take("tender"))
        asleep = self.hibernation.asleep
        self.kernel.recover(record["kernel"], persisted.take("watched"), asleep=asleep)
        self.demand.hold = SuspendHold(**record["hold"]) if record["hold"] else None
        self.automatic.recover(record["automatic"])
        self.history.fresh = record["fresh"]
        if failed or was is State.SUSPENDED:
            core.state, core.reason, core.since = was, record["reason"], record["since"]
            ended = failed or page.presence == Presence.ENDED
            state.announce(Presence.ENDED if ended else Presence.ABSENT, core.reason)
        elif state.memory.client.head or page.memory_granted:
            self.demand.lost()
            grant, ledger = page.memory_granted, core.allocator.ledger
            if was is not State.QUEUED and not ledger.short(self.id, grant):
                ledger.hold(self.id, grant)  # before sessions that waited for memory
        self.preferences.recover(record["wanted"])
        self.membership.recover(record.get("job"))
        core.request_reconcile()

    def begin_suspended(self, reason: str) -> None:
        """Begin as a session that was used and then suspended."""
        self.core.set_state(State.SUSPENDED, reason)
        self.persist()

    # ---------------------------------------------------------------- its end

    def fail(self, reason: str) -> None:
        """Fail it for good: its client raises the reason, and its device memory is freed."""
        state, core = self.device_state, self.core
        worker, state.worker = state.worker, None
        if worker is None:
            self.lease.close()
        else:
            self._burying = asyncio.create_task(self._end_failed(worker))
        core.allocator.leave_queue(self.tenant)
        core.allocator.release(self.tenant)
        core.set_state(State.FAILED, reason)
        state.announce(Presence.ENDED, reason)

    async def _end_failed(self, worker: Worker) -> None:
        """End its worker, then its lease: another session may execute once the worker is gone."""
        try:
            await worker.stop()
            worker.close()
        finally:
            self.lease.close()

    def close(self, why: str, *, died: bool = False) -> asyncio.Task[None]:
        """Close it and free all it has. Idempotent.

        Parameters
        ----------
        why : str
        died : bool
            True if its kernel ended, as far as is known unexpectedly.
        """
        if self._closing is None:
            died = died and not self.core.script and not self.kernel.end_is_wanted
            self._services.runs.ended(self.id, died=died)
            log.info("Session %s closes: %s", self.id, why)
            self.core.closing = True
            self._closing = asyncio.create_task(self._close(why), name=f"close {self.id}")
            self.core.wakeup.set()
        return self._closing

    async def _close(self, why: str) -> None:
        core, state, services = self.core, self.device_state, self._services
        self.kernel.unwatch()
        self.idle.cancel()
        self.snapshots.cancel()
        self.observed.cancel()
        self.demand.close()
        if state.worker is not None:
            await state.worker.stop()  # its answers are not needed any more
        if self._burying is not None:
            await self._burying
        self.lease.close()
        self.managers.close()
        await self.hibernation.close()
        self.requests.give_up(f"Session {self.id} has ended: {why}")
        await self.automatic.close()
        tasks = [self._reconciling, *self.commands.running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.observed.cancel()  # the loop may have set the timer meanwhile
        async with core.locked_at_last():  # a neighbour may be suspending this session
            core.allocator.leave_queue(self.tenant)
            del core.allocator.tenants[self.id]
            state.announce(Presence.ENDED, why)
            stored = state.disk.stored
            self._withdrawn = True
            services.fdstore.drop(self.id)
            services.observer.executed(self)
            await state.close()
            if stored is not None:
                await services.host.cold.forget(stored)
            services.host.forget(self.spiller)
            core.allocator.release(self.tenant)
        self.kernel.hang_up()
        self._on_closed(self)
