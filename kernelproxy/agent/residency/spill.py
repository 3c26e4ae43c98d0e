"""Spilling of a suspended session to disk."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.session.states import State
from kernelproxy.agent.spill.host_memory import HostMemory
from kernelproxy.agent.spill.spill_policy import SuspendedState
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import StoreError


class Spiller:
    """A session as `spill.host_memory` sees it; its methods are those of `HostMemoryUser`.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    idle : IdleTimer
    kernel : KernelConnection
    host : HostMemory
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        idle: IdleTimer,
        kernel: KernelConnection,
        host: HostMemory,
    ) -> None:
        self.id = core.id
        self._core, self._state, self._demand = core, state, demand
        self._idle, self._kernel, self._host = idle, kernel, host

    @property
    def user(self) -> str:
        """See `HostMemoryUser`."""
        return self._core.user

    @property
    def host_bytes(self) -> int:
        """See `HostMemoryUser`."""
        return self._state.host_bytes

    @property
    def lock_taken(self) -> bool:
        """See `HostMemoryUser`."""
        return bool(self._core.lock_waiters)

    def admitted(self, count: int) -> AbstractAsyncContextManager[None]:
        """Reserve so many more bytes of host memory for it; see `HostMemory.admitted`."""
        return self._host.admitted(self, count)

    def host_changed(self) -> None:
        """Note that it was suspended, or uses more host memory."""
        self._host.changed()

    @property
    def usable(self) -> bool:
        """True if states may go to disk."""
        return self._host.cold.usable

    def disk_left(self) -> int:
        """Return the bytes that its user may still use on disk; raises StoreError."""
        return self._host.cold.left(self._core.user)

    def as_suspended(self) -> SuspendedState | None:
        """See `HostMemoryUser`."""
        core, state = self._core, self._state
        parked = core.state is State.SUSPENDED and state.worker is None and state.snapshot
        if not parked or state.disk.alone or core.lock_waiters or core.closing:
            return None
        return SuspendedState(core.id, state.memory.arena_bytes(), self._idle.active)

    async def spill(self) -> bool:
        """See `HostMemoryUser`."""
        if self._core.lock_waiters:
            return False
        async with self._core.exclusive():
            try:
                return await self.spill_locked()
            except (StoreError, OSError) as error:
                problem = error  # of the disk, not of the session
        raise problem

    async def spill_locked(self) -> bool:
        """Do the same as `spill`; the caller holds the session's lock."""
        core, state = self._core, self._state
        suspended = core.state is State.SUSPENDED and state.worker is None
        if not suspended or state.snapshot is None or state.disk.alone or core.closing:
            return False
        cold = self._host.cold
        label = cold.label(
            core.id,
            core.name,
            core.owner,
            core.user,
            self._kernel.torch_version or "",
            state.device.kind.name.lower(),
            state.position,
        )
        storing = state.store(cold, label)
        try:
            while not (storing.task.done() or core.awaited or self._demand.wants_worker()):
                wakeup = asyncio.create_task(core.wakeup.wait())
                await asyncio.wait({storing.task, wakeup}, return_when=asyncio.FIRST_COMPLETED)
                wakeup.cancel()
                core.wakeup.clear()
        finally:
            await storing.end()
        error = storing.task.exception()
        if error is None:
            # The reason of a hibernation says more, and this may be persisted.
            if not core.inhibited(Inhibitor.HIBERNATION):
                way_back = reasons.way_back(self._demand.hold, script=core.script)
                core.reason = f"Saved to disk. {way_back}"
                core.happened("swapped_out", core.reason)
            await state.rely_on_disk()
        core.request_reconcile()
        if error is None or (isinstance(error, StoreError) and error.reason == "cancelled"):
            return error is None
        raise error
