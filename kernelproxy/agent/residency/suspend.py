"""Suspending a session: its state is saved, and its worker ends."""

from __future__ import annotations

import logging
from dataclasses import replace

from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.observed_state import ObservedState
from kernelproxy.agent.residency.spill import Spiller
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.session.states import State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.snapshot_scheduler import SnapshotScheduler
from kernelproxy.common.errors import ControlError, WorkerError
from kernelproxy.common.readable import moment
from kernelproxy.common.shared_memory import Presence

log = logging.getLogger(__name__)


class Suspender:
    """Suspends one session. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    lease : DeviceLease
    idle : IdleTimer
    spiller : Spiller
    observed : ObservedState
    snapshots : SnapshotScheduler
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        lease: DeviceLease,
        idle: IdleTimer,
        spiller: Spiller,
        observed: ObservedState,
        snapshots: SnapshotScheduler,
    ) -> None:
        self._core, self._state, self._demand, self._lease = core, state, demand, lease
        self._idle, self._spiller, self._observed, self._snapshots = (
            idle,
            spiller,
            observed,
            snapshots,
        )

    async def suspend_if_idle(self, why: str, *, waiters_present: bool = False) -> bool:
        """Suspend it, unless it is pinned or begins to work meanwhile; return True on success.

        `waiters_present`: others wait for that.
        """
        core = self._core
        if core.inhibited(Inhibitor.PIN):
            return False
        try:
            # Without a lease nothing executes, even if the log has work.
            busy = self._lease.held
            if not await self.unload(unless_busy=busy, waiters_present=waiters_present):
                core.request_reconcile()
                return False
        except ControlError as error:
            if error.message != self._observed.suspend_failure:
                log.warning("Session %s stays on its device: %s", core.id, error.message)
            self._observed.suspend_failure = error.message
            if not waiters_present:
                self._idle.note_use()  # as below
            self._observed.update()
            return False
        except WorkerError as error:
            log.warning("Session %s could not be suspended: %s", core.id, error)
            self._idle.note_use()  # try again after another full timeout
            return False
        self.suspended(f"{why}. {self.way_back()}")
        return True

    async def unload(self, *, unless_busy: bool, waiters_present: bool = False) -> bool:
        """End its worker, as `DeviceState.unload`, if its state fits into host memory.

        Raises
        ------
        ControlError
            ``quota``, if it does not fit; the worker continues.
        WorkerError
            As `DeviceState.unload`.
        """
        state = self._state
        count = state.dirty_bytes if state.worker is not None and not state.saved else 0
        async with self._spiller.admitted(count):
            return await state.unload(unless_busy=unless_busy, waiters_present=waiters_present)

    def suspended(self, reason: str) -> None:
        """Note that its worker is gone and its state is saved."""
        self._demand.needed = False
        self._core.set_state(State.SUSPENDED, reason)
        self.leave_device()
        # Something may have been appended before that was announced.
        self._core.request_reconcile()

    def note_end_of_paused_cell(self) -> None:
        """Update the reason once the cell has ended (as by an interrupt) that it was paused in."""
        core, demand, client = self._core, self._demand, self._state.memory.client
        hold = demand.hold
        if hold is None or not hold.in_cell or client.cells_running:
            return
        if core.state is State.SUSPENDED:
            demand.hold = replace(hold, in_cell=False)
            why = f"Suspended by {hold.by}, {moment(hold.at)}."
            core.set_state(State.SUSPENDED, f"{why} {self.way_back()}")
            core.persist()

    def leave_device(self) -> None:
        """Free its device memory for others: its worker is gone, and its state is saved."""
        core, state, self._observed.suspend_failure = self._core, self._state, ""
        if state.drained:
            # Nothing will be replayed, so it needs no more than its memory in use to resume.
            state.replay_grant = 0
            state.cut_grant(0)
            state.replay_grant = state.memory.agent.memory_granted
        self._demand.expedite()
        self._snapshots.cancel()
        state.announce(Presence.ABSENT)
        self._lease.suspended()
        self._lease.left_device()
        core.allocator.release(core.tenant)
        self._spiller.host_changed()

    def way_back(self) -> str:
        """Return a sentence about what resumes it."""
        return reasons.way_back(self._demand.hold, script=self._core.script)
