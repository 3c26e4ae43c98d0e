"""A session loses its worker: because the worker died, or because it lacks memory on its device."""

from __future__ import annotations

import logging

from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.memory_requests import MemoryRequests
from kernelproxy.agent.residency.restore import Restorer
from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.snapshot_scheduler import SnapshotScheduler
from kernelproxy.agent.workers.crash_policy import Verdict
from kernelproxy.common.errors import ControlError, WorkerError

log = logging.getLogger(__name__)


class WorkerLoss:
    """Handles the loss of one session's worker. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    lease : DeviceLease
    memory : MemoryRequests
    suspender : Suspender
    restorer : Restorer
    snapshots : SnapshotScheduler
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        lease: DeviceLease,
        memory: MemoryRequests,
        suspender: Suspender,
        restorer: Restorer,
        snapshots: SnapshotScheduler,
    ) -> None:
        self._core, self._state, self._demand, self._lease = core, state, demand, lease
        self._memory, self._suspender, self._restorer = memory, suspender, restorer
        self._snapshots = snapshots

    async def give_way(self) -> None:
        """Suspend it, so that it waits off its device for memory that others use there.

        Note [Giving way]: a session that holds some memory while it waits for more keeps others
        from theirs, and they may do the same (hold and wait: a deadlock). So no session waits like
        that: if its request does not fit beside the sessions that execute, it leaves the device and
        queues for all that it needs. A request is refused only if it could not be granted even to
        that session alone.
        """
        core, state = self._core, self._state
        self._lease.monitor.measure()  # including what it needs now
        try:
            if not await self._suspender.unload(unless_busy=False, waiters_present=True):
                core.request_reconcile()
                return
        except (ControlError, WorkerError) as error:
            log.warning("Session %s cannot wait for memory elsewhere: %s", core.id, error)
            self._memory.publish(core.allocator.ledger.of(core.id), state.memory_request)
            return
        self._demand.needed = True
        self._suspender.leave_device()
        await self._restorer.restore()

    async def reap_worker(self) -> None:
        """Clean up after a dead worker; restoring follows if the verdict allows."""
        core, state, demand = self._core, self._state, self._demand
        worker = state.worker
        if worker is not None and worker.hung:
            demand.why_died = f"{worker.hung}. Stopped it and rebuilding its state."
            log.warning("Session %s: %s", core.id, demand.why_died)
        approximate = state.inexact_since(state.position) is not None
        verdict, corrupt = await state.reap_worker()
        log.warning("Session %s: its worker died: %s", core.id, verdict.value)
        lost, deaths = worker.lost if worker is not None else None, state.deaths
        if lost is not None:
            skipped = verdict is Verdict.SKIP
            careful = deaths.careful_until > state.position
            demand.why_died = reasons.device_lost(lost.message, skipped=skipped, careful=careful)
            log.warning("Session %s: %s", core.id, demand.why_died)
            allocator, party = core.allocator, f"user {core.owner}" if core.shared else core.id
            allocator.on_loss(allocator, party, lost)
        demand.lost()
        self._lease.lost(demand.why_died)
        what = demand.why_died or (reasons.NO_ROOM if state.without_room else reasons.REBUILT)
        if verdict is Verdict.SKIP and deaths.skip[-1] in deaths.starved:
            what = "Out of host memory: one operation was skipped. Everything else is rebuilt."
            log.warning("Session %s: %s", core.id, what)
        if approximate:
            what = f"{what} {reasons.APPROXIMATE}"
            log.warning("Session %s: %s", core.id, what)
        core.happened("lost", what)
        if corrupt is not None:
            core.fail(f"Its log is corrupt: {corrupt}")
        elif state.unrecoverable:
            core.fail(f"The GPU process died. {self._snapshots.obstacle}")
        elif verdict is Verdict.FAIL:
            core.fail("The GPU process died several times, and replaying does not help.")
        elif seconds := state.deaths.pause:
            again = f"Again and again: {lost.message}." if lost is not None else ""
            if state.without_room:
                again = reasons.NO_ROOM
            self._restorer.postpone(again or "The GPU process was ended several times.", seconds)
