"""Gathering the ranks of a job in one process, after they have started in different ones.

That is the case if they have used the device before they joined the job, and after a crash; see
Note [Seats] in `workers.seat`.
"""

from __future__ import annotations

from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.residency.worker_sources import WorkerSources
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.worker import Worker


class SeatMove:
    """Moves one session to the process of its job. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    lease : DeviceLease
    sources : WorkerSources
    suspender : Suspender
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        lease: DeviceLease,
        sources: WorkerSources,
        suspender: Suspender,
    ) -> None:
        self._core, self._state, self._lease = core, state, lease
        self._sources, self._suspender = sources, suspender
        self._tried: Worker | None = None

    async def take_due(self) -> None:
        """Suspend it after its turn: when it resumes, it is in the process of its job."""
        worker, device = self._state.worker, self._core.allocator.device
        if worker is None or worker.broken or worker.in_seat or not self._sources.may_share(device):
            return
        # Where there are no turns, it would be interrupted.
        if worker is self._tried or self._lease.held or not self._lease.scheduled:
            return
        self._tried = worker
        await self._suspender.suspend_if_idle("Joins the other ranks of its job")
