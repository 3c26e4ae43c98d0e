"""Leases: groups of one pod, with the engine's interface (`scheduler.decisions.Guarantees`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jupyter_sing.scheduler.decisions import Bound, Guarantees, NoPlacement, Victims
from jupyter_sing.scheduler.hived.allocation import HivedCluster
from jupyter_sing.scheduler.hived.cells import (
    AffinityGroup,
    GroupMember,
    GroupRequest,
    GroupWaiting,
    Placed,
)
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.config.reconfiguration import Changes, reconfigured, regain
from jupyter_sing.scheduler.hived.errors import RequestError
from jupyter_sing.scheduler.ids import DeviceId


class HivedGuarantees(Guarantees):
    """Devices that requests hold or have reserved. The contract is that of `Guarantees`.

    A lease with a guarantee can become opportunistic while it is held: when a request of its
    virtual cluster with a higher priority needs the guarantee and other devices are available (lazy
    preemption). `guaranteed` returns the present state.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.cluster = HivedCluster(configuration)

    def place(
        self, request: str, vc: str, priority: int, leaves: int, prefer: Sequence[DeviceId]
    ) -> Bound | Victims | NoPlacement:
        """Find devices for a request; see `Guarantees.place`.

        A reservation that was made with other parameters, or has lost a device, is cancelled first.
        A virtual cluster that is not in the configuration is guaranteed nothing.

        Raises
        ------
        RequestError
            If there is no such priority, or the request holds devices already.
        """
        cluster = self.cluster
        cluster.admit(vc)
        requested = GroupRequest(request, vc, priority, (GroupMember(1, leaves),), any_pinned=True)
        known = cluster.groups.get(request)
        if known is not None and known.preempting and known.request != requested:
            cluster.cancel(request)
        near = [cluster.devices[name] for name in prefer if name in cluster.devices]
        outcome = cluster.schedule(requested, prefer=near)
        if isinstance(outcome, GroupWaiting):
            return NoPlacement(outcome.reason)
        devices = _devices(outcome.group)
        if isinstance(outcome, Placed):
            return Bound(devices, guaranteed=outcome.group.guaranteed)
        return Victims(devices, tuple(group.request.name for group in outcome.victims))

    def release(self, request: str) -> None:
        """Release what a request holds or has reserved, if anything."""
        if request in self.cluster.groups:
            self.cluster.release(request)

    def cancel(self, request: str) -> None:
        """Cancel the reservation of a request, if any; its victims keep what they hold.

        Raises
        ------
        RequestError
            If it holds its devices already.
        """
        if request in self.cluster.groups:
            self.cluster.cancel(request)

    def set_health(self, device_or_node: str, good: bool) -> None:
        """Mark a device, or all devices of a node, as usable or not. Its holder keeps it.

        Raises
        ------
        RequestError
            If there is neither a device nor a node of that name.
        """
        self.cluster.set_health(device_or_node, good)

    def free(self, vc: str) -> int:
        """Return the number of devices that this virtual cluster could still be guaranteed now."""
        self.cluster.admit(vc)
        return self.cluster.unused(vc)

    def adopt(self, request: str, vc: str, devices: Sequence[DeviceId]) -> bool:
        """Record that a request holds these devices already; see `Guarantees.adopt`.

        Devices that are in no cell are left out.
        """
        cluster = self.cluster
        cluster.admit(vc)
        known = [(cluster.devices[name], None) for name in devices if name in cluster.devices]
        requested = GroupRequest(request, vc, 0, (GroupMember(1, len(devices)),), any_pinned=True)
        group = AffinityGroup(requested, [known])
        group.slots[0].leaves = len(devices)
        cluster.adopt(group)
        return len(known) == len(devices) and regain(cluster, group)

    def widest(self) -> int:
        """Return the size of the largest node: a request is not divided among nodes."""
        nodes = Counter(device.node for device in self.cluster.devices.values())
        return max(nodes.values(), default=0)

    def guaranteed(self, request: str) -> bool:
        """True if a request holds its devices, or will, by right of a guarantee.

        Raises
        ------
        RequestError
            If it holds nothing.
        """
        if request not in self.cluster.groups:
            raise RequestError(f"{request} holds nothing.")
        return self.cluster.groups[request].guaranteed

    def reconfigure(self, configuration: Configuration) -> Changes:
        """Switch to another configuration; holders of devices keep them. See `reconfigured`."""
        self.cluster, changes = reconfigured(self.cluster, configuration)
        return changes


def _devices(group: AffinityGroup) -> tuple[DeviceId, ...]:
    return tuple(str(seat.physical.device) for seat in group.seats)
