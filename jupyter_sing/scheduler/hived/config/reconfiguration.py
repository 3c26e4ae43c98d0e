"""Change of the configuration under running groups: they keep devices, and rights where possible.

A group whose devices no longer match the guarantees of its virtual cluster becomes opportunistic;
so does one for which less is guaranteed now than is held, those of the lowest priorities first.
Reservations end, as in a restart; their groups have to request again.
"""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.scheduler.hived.allocation import HivedCluster
from jupyter_sing.scheduler.hived.cells import AffinityGroup, PhysicalCell, Seat, VirtualCell
from jupyter_sing.scheduler.hived.claiming import claims
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.config.layout import VirtualClusterCells
from jupyter_sing.scheduler.hived.errors import RequestError


@dataclass(frozen=True, slots=True)
class Changes:
    """Effects of a new configuration on the groups that were present.

    Attributes
    ----------
    downgraded
        Groups that are opportunistic now and were not.
    lost
        Groups that hold devices that are no longer in any cell. They continue; the devices are not
        counted.
    cancelled
        Groups whose reservations ended.
    """

    downgraded: tuple[str, ...]
    lost: tuple[str, ...]
    cancelled: tuple[str, ...]


def reconfigured(old: HivedCluster, configuration: Configuration) -> tuple[HivedCluster, Changes]:
    """Create a cluster of another configuration with the groups of an old one.

    Parameters
    ----------
    old
        Must not be used afterwards.

    Returns
    -------
    Cluster, Changes
        The groups have their names, requests and pods; devices are matched by their names.
    """
    cancelled = tuple(name for name, group in old.groups.items() if group.preempting)
    for name in cancelled:
        old.cancel(name)
    new = HivedCluster(configuration)
    for name in old.bad_names:
        try:
            new.set_health(name, good=False)
        except RequestError:
            continue  # it no longer exists
    moved = {name: _moved(group, new) for name, group in old.groups.items()}
    for group in moved.values():
        new.adopt(group)
    downgraded = []
    by_priority = sorted(old.groups.values(), key=lambda group: -group.request.priority)
    for group in by_priority:
        if group.guaranteed and not _regained(new, group, moved[group.request.name]):
            downgraded.append(group.request.name)
    lost = [
        name
        for name, group in moved.items()
        if any(len(slot.seats) < slot.leaves for slot in group.slots)
    ]
    return new, Changes(tuple(downgraded), tuple(lost), cancelled)


def regain(cluster: HivedCluster, group: AffinityGroup) -> bool:
    """Let a group that borrows its devices hold them by guarantee, if one cell has room for all."""
    devices = [seat.physical for seat in group.seats]
    for holding in cluster.virtual_cluster(group.request.vc).all_holdings:
        if any(device.chain is not holding.chain for device in devices):
            continue
        found = claims(devices, holding, cluster.pools[holding.chain.name])
        if found and _roots(found) == 1:
            for seat, virtual in zip(group.seats, found, strict=True):
                cluster.seating.reseat(seat, virtual)
            return True
    return False


def _moved(group: AffinityGroup, new: HivedCluster) -> AffinityGroup:
    """Return the group in the new cluster, opportunistic, with the devices that still exist."""
    places = [
        [
            (new.devices[seat.physical.device], None)
            for seat in slot.seats
            if seat.physical.device in new.devices
        ]
        for slot in group.slots
    ]
    moved = AffinityGroup(group.request, places)
    for slot, before in zip(moved.slots, group.slots, strict=True):
        slot.leaves, slot.pod = before.leaves, before.pod
    return moved


def _regained(new: HivedCluster, old: AffinityGroup, group: AffinityGroup) -> bool:
    """Let a group hold its devices by guarantee again, if there is one for each of its pods."""
    vc = new.virtual_clusters.get(group.request.vc)
    if vc is None:
        return False
    before = {seat.physical.device: seat.virtual for seat in old.seats}
    done: list[Seat] = []
    for slot in group.slots:
        devices = [seat.physical for seat in slot.seats]
        virtuals = [v for d in devices if (v := before[d.device]) is not None]
        found = _guarantees_for(new, vc, devices, virtuals)
        if found is None:
            for undone in reversed(done):
                new.seating.reseat(undone, None)
            return False
        for seat, virtual in zip(slot.seats, found, strict=True):
            new.seating.reseat(seat, virtual)
            done.append(seat)
    return bool(done)


def _guarantees_for(
    new: HivedCluster,
    vc: VirtualClusterCells,
    devices: list[PhysicalCell],
    before: list[VirtualCell],
) -> list[VirtualCell] | None:
    """Return guaranteed devices for those of a pod, in the same or no more cells than before."""
    if not devices:
        return []
    pinned = vc.pinned.get(before[0].holding.pinned or "")
    for holding in (pinned, vc.holdings.get(devices[0].chain.name)):
        if holding is None or any(device.chain is not holding.chain for device in devices):
            continue
        pool = new.pools[holding.chain.name]
        levels = [
            level
            for virtual in before
            if (level := holding.chain.level_of(virtual.root.type)) is not None
        ]
        if len(levels) == len(devices):
            found = claims(devices, holding, pool, levels)
            if found is not None:
                return found
        found = claims(devices, holding, pool)
        if found is not None and _roots(found) <= _roots(before):
            return found
    return None


def _roots(virtuals: list[VirtualCell]) -> int:
    return len({id(virtual.root) for virtual in virtuals})
