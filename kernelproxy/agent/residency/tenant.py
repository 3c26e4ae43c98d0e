"""A session as its device's allocator uses it: what it uses, and how it makes room for others."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from kernelproxy.agent.devices.co_tenants import known_as
from kernelproxy.agent.devices.memory_accounts import WorkerMemory
from kernelproxy.agent.devices.memory_grants import Neighbour
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.memory_requests import MemoryRequests
from kernelproxy.agent.residency.observed_state import ObservedState
from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import InternalError

#: Seconds in which a worker must give back its cache; it waits for the work of its device.
CACHE_SECONDS = 5.0


class SessionTenant:
    """One session on its device; its methods are those of `Tenant`.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    lease : DeviceLease
    idle : IdleTimer
    memory : MemoryRequests
    suspender : Suspender
    observed : ObservedState
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        lease: DeviceLease,
        idle: IdleTimer,
        memory: MemoryRequests,
        suspender: Suspender,
        observed: ObservedState,
    ) -> None:
        self.id, self.name, self.owner, self.user = core.id, core.name, core.owner, core.user
        self._core, self._state, self._lease, self._idle = core, state, lease, idle
        self._memory, self._suspender, self._observed = memory, suspender, observed

    @property
    def suspend_failure(self) -> str:
        """See `Tenant`."""
        return self._observed.suspend_failure

    @property
    def wants_turns(self) -> bool:
        """See `Tenant`."""
        return self._lease.wanted

    @property
    def memory_limit(self) -> int:
        """See `Tenant`."""
        return self._state.memory_limit

    @property
    def used(self) -> int:
        """See `Tenant`."""
        return min(self._state.memory.client.memory_used, self._granted)

    @property
    def _granted(self) -> int:
        return self._core.allocator.ledger.of(self.id)

    @property
    def kept(self) -> int:
        """See `Tenant`."""
        if not self._core.inhibited(Inhibitor.PIN):
            return 0
        granted, state = self._granted, self._state
        return min(granted, state.memory.client.memory_used) if state.drained else granted

    def as_neighbour(self) -> Neighbour | None:
        """See `Tenant`."""
        core, state = self._core, self._state
        if state.worker is None or state.worker.broken or core.lock_waiters or core.closing:
            return None
        granted = self._granted
        # While the log has work, executing it may need more than the client uses now.
        used = state.memory.client.memory_used if state.drained else granted
        stays = core.inhibited(Inhibitor.PIN) or (self._lease.held and not state.idle)
        return Neighbour(self.id, granted, used, None if stays else self._idle.active)

    @property
    def pids(self) -> Collection[int]:
        """See `MeasuredTenant`."""
        return self._state.pids

    def worker_memory(self) -> WorkerMemory | None:
        """See `MeasuredTenant`."""
        state = self._state
        if state.worker is None or state.worker.exited.is_set():
            return None
        return WorkerMemory(state.pids, state.resident_bytes, self._granted)

    async def give_back_cache(self) -> int | None:
        """See `MeasuredTenant`."""
        worker = self._state.worker
        return None if worker is None else await worker.give_back_cache(CACHE_SECONDS)

    @property
    def lock_taken(self) -> bool:
        """See `Tenant`."""
        core = self._core
        return bool(
            core.lock_waiters
            and not core.closing
            and self._granted
            and not self._state.wants_memory
        )

    def cut_grant(self, grant: int) -> int:
        """See `Tenant`."""
        return self._memory.cut(grant)

    async def evict(self, device: str, reason: str) -> bool:
        """Suspend it if it is on `device` and does not execute; return True if it is suspended.

        False if it is on another device.
        """
        core, state = self._core, self._state
        state.expedite()
        async with core.exclusive():
            if core.allocator.device.id != device:
                return False
            if state.worker is None:
                self._lease.left_device()
                return True
            return not self._lease.held and await self._suspender.suspend_if_idle(
                reason, waiters_present=True
            )

    async def suspend_for(self, other: str) -> bool:
        """See `Tenant`."""
        with contextlib.suppress(InternalError):
            async with self._core.exclusive():
                made_for = known_as(self, self._core.allocator.tenants.get(other))
                return await self._suspender.suspend_if_idle(
                    f"Made room for {made_for}", waiters_present=True
                )
        return True  # it has failed, which freed its memory, too

    def request_reconcile(self) -> None:
        """See `Tenant`."""
        self._core.request_reconcile()
