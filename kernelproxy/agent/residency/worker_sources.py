"""Sources of a session's workers: a zygote, a process of its job, a context in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.job import JobMembership
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.state.context_pool import ContextPool, PooledSource
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.seats import SeatKey, Seats, SeatSource, WorkerSource
from kernelproxy.agent.workers.zygotes import Zygote, Zygotes
from kernelproxy.common.errors import WorkerError
from kernelproxy.devices import Device, DeviceKind


class WorkerSources:
    """The sources of the workers of one session.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    kernel : KernelConnection
    membership : JobMembership
    zygotes : Zygotes
    settings : AgentSettings
    contexts : mapping of str to ContextPool
        By device.
    seats : Seats
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        kernel: KernelConnection,
        membership: JobMembership,
        zygotes: Zygotes,
        settings: AgentSettings,
        contexts: Mapping[str, ContextPool],
        seats: Seats,
    ) -> None:
        self._core, self._state, self._kernel, self._membership = core, state, kernel, membership
        self._zygotes, self._settings = zygotes, settings
        self._contexts, self._seats = contexts, seats

    async def zygote(self) -> Zygote:
        """Return the zygote for its worker; raises WorkerError."""
        return await self._zygotes.get(self._core.python, self._kernel.torch_version)

    async def on(self, device: Device) -> WorkerSource:
        """Return what forks a worker for a device, without a context in advance.

        Raises
        ------
        WorkerError
            As `Zygotes.get`.
        """
        zygote, job = await self.zygote(), self._membership.job
        if job is None or not self.may_share(device):
            return zygote
        return SeatSource(SeatKey(self._core.owner, job.id, device.id, zygote), self._seats)

    def may_share(self, device: Device) -> bool:
        """Return True if its next worker on a device may be in a process with others of its job."""
        job = self._membership.job
        if job is None or job.size == 1 or not self._settings.seats:
            return False
        return device.kind is DeviceKind.SOFTWARE and self._state.may_share

    async def in_time(self) -> WorkerSource:
        """Return what forks its worker on its device, with a time limit in the shared daemon.

        The session holds device memory meanwhile. Raises WorkerError.
        """
        limit = self._settings.order_seconds if self._core.shared else None
        device = self._core.allocator.device
        try:
            async with asyncio.timeout(limit):
                source = await self.on(device)
        except TimeoutError as error:
            raise WorkerError(f"{self._core.python} does not start.") from error
        pool = self._contexts.get(device.id)
        return source if pool is None else PooledSource(source, pool)
