"""Reasons why a session waits: a lease, device memory, or its next attempt to get a worker."""

from __future__ import annotations

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.scheduler_api import Arbiter, SessionOutlook


class WaitReasons:
    """Tells whether one session waits for what others have, and for what. Changes nothing.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    lease : DeviceLease
    arbiter : Arbiter
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        lease: DeviceLease,
        arbiter: Arbiter,
    ) -> None:
        self._core, self._state, self._demand = core, state, demand
        self._lease, self._arbiter = lease, arbiter

    def need(self) -> int:
        """Return the bytes of device memory that it must have to execute."""
        state = self._state
        memory_request, granted = state.memory_request, state.memory.agent.memory_granted
        wanted = memory_request.bytes if memory_request else state.memory.client.memory_used
        return min(max(granted, state.replay_grant, wanted), self._core.allocator.ledger.total)

    def outlook(self) -> SessionOutlook | None:
        """Return what it can expect while it is queued; None if unknown."""
        core = self._core
        if place := core.allocator.place(core.tenant):
            return SessionOutlook(place, None, core.reason)
        found = self._arbiter.outlook(core.id)
        if found is None:
            return None
        kept = self.device_failure() or self.blocked_by_pins()
        seconds = None if kept else found.seconds
        return SessionOutlook(found.position, seconds, kept or self.why(found.reason))

    def _allocators(self) -> list[DeviceAllocator]:
        """List the devices that it may use."""
        core = self._core
        bound = core.request.device is not None or core.inhibited(Inhibitor.PIN)
        return [core.allocator] if bound else core.allocator.allocators

    def device_failure(self) -> str:
        """Return why no device that it may use can be used; "" if there is one."""
        failures = [each.failure for each in self._allocators()]
        return " ".join(failures) if all(failures) else ""

    def blocked_by_pins(self) -> str:
        """Return who keeps memory that it needs even with a lease; "" if nothing keeps it out."""
        core = self._core
        if self._state.worker is not None:
            return ""
        allocators = self._allocators()
        kept = {
            allocator: allocator.kept_from(core.tenant, self.need()) for allocator in allocators
        }
        return kept[core.allocator] if all(kept.values()) else ""

    def why(self, reason: str) -> str:
        """Return why it has no lease, after why it needs one if its worker died."""
        return f"{self._demand.why_died} {reason or 'Waiting for its turn.'}".strip()

    def why_queued(self) -> str:
        """Return why it is queued for a lease."""
        return self.device_failure() or self.blocked_by_pins() or self.why(self._lease.reason)

    def blocked(self) -> bool:
        """Return True if it is known by now to wait for what others have, or for a retry."""
        core = self._core
        return bool(
            self._demand.obstacle
            or self._lease.reason
            or core.allocator.place(core.tenant)
            or self.device_failure()
            or self.blocked_by_pins()
        )
