"""Search for the place of a group, in what it is guaranteed or in the whole cluster.

Pods are placed one after the other, the largest first, each on the node whose free devices it fills
best. On a node, devices are chosen from the smallest cell that has enough of them, so that the
devices of a pod are near each other and large cells stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from jupyter_sing.scheduler.hived.cells import (
    FREE,
    OPPORTUNISTIC,
    Holding,
    PhysicalCell,
    VirtualCell,
)
from jupyter_sing.scheduler.hived.pool import Pool
from jupyter_sing.scheduler.hived.shadows import shadows

Cell = TypeVar("Cell", PhysicalCell, VirtualCell)
Suggested = frozenset[str] | None  # names of the nodes that may be used; None: all


def usable(cell: PhysicalCell, suggested: Suggested) -> bool:
    """True if any device in a cell may be used."""
    if cell.bad == cell.leaves:
        return False
    return suggested is None or any(name in suggested for name in cell.nodes)


def nearest(cell: Cell, count: int, available: dict[Cell, None], seed: Cell | None) -> list[Cell]:
    """Choose devices of a cell that are as near to each other as possible.

    Parameters
    ----------
    available
        Devices that may be chosen, at least `count` of them within the cell.
    seed
        A device that should be among them.
    """
    if not cell.children:
        return [cell]
    if count == 1 and seed is not None:
        return [seed]
    inside = [
        (child, sum(device in available for device in child.devices)) for child in cell.children
    ]
    fitting = [(child, number) for child, number in inside if number >= count]
    if fitting:
        best, _ = min(fitting, key=lambda pair: (not _within(seed, pair[0]), pair[1]))
        return nearest(best, count, available, seed)
    chosen: list[Cell] = []
    for child, number in sorted(inside, key=lambda pair: (not _within(seed, pair[0]), -pair[1])):
        part = min(number, count - len(chosen))
        if part:
            chosen += nearest(child, part, available, seed if _within(seed, child) else None)
    return chosen


def _within(seed: Cell | None, cell: Cell) -> bool:
    return seed is not None and seed in cell.devices


class VirtualSearch:
    """Searches for devices in what a virtual cluster is guaranteed.

    Parameters
    ----------
    suggested
        Nodes that may be used. An unbound guaranteed cell is expected to find one of them.
    """

    def __init__(self, holding: Holding, pool: Pool, suggested: Suggested) -> None:
        self.holding = holding
        self.pool = pool
        self.suggested = suggested
        self.shadows = shadows(holding, pool)
        self._chosen: dict[VirtualCell, None] = {}

    def find(
        self, sizes: Sequence[int], below: int, prefer: Sequence[PhysicalCell]
    ) -> list[list[VirtualCell]] | None:
        """Find devices for all pods.

        Parameters
        ----------
        sizes
            Devices of each pod, descending.
        below
            Groups with a lower priority may be preempted; -1: none.
        prefer
            Devices where the first pod should be if that preempts no group, best first.
        """
        self._chosen = {}
        if below > OPPORTUNISTIC and all(priority >= below for priority in self.holding.used):
            return None
        places: list[list[VirtualCell]] = []
        for size in sizes:
            place: list[VirtualCell] | None = None
            if below == OPPORTUNISTIC:
                place = None if places else self._preferred(size, prefer)
                place = place or self._unused(size)
            else:
                place = self._preempting(size, below)
            if place is None:
                return None
            places.append(place)
            self._chosen.update(dict.fromkeys(place))
        return places

    def devices(self, node: VirtualCell, below: int = OPPORTUNISTIC) -> dict[VirtualCell, None]:
        """Return the devices of a node that could be had."""
        physical = node.physical or self.shadows.get(node)
        if physical is not None and not usable(physical, self.suggested):
            return {}
        return {
            device: None
            for device in node.devices
            if (not device.busy or device.priority < below)
            and device not in self._chosen
            and not self._bad(device)
        }

    def _bad(self, device: VirtualCell) -> bool:
        physical = device.physical or self.shadows.get(device)
        return physical is not None and physical.bad > 0

    def _unused(self, size: int) -> list[VirtualCell] | None:
        best, best_key = None, (0, False)
        for node in self.holding.nodes:
            free = node.leaves - node.busy
            if free < size:
                continue
            physical = node.physical or self.shadows.get(node)
            if self._chosen or (physical is not None and physical.bad):
                free = len(self.devices(node))
            elif physical is not None and not usable(physical, self.suggested):
                continue
            key = (free, node.root.physical is None)
            if free >= size and (best is None or key < best_key):
                best, best_key = node, key
                if key == (size, False):
                    break  # nothing is better
        return None if best is None else nearest(best, size, self.devices(best), None)

    def _preferred(self, size: int, prefer: Sequence[PhysicalCell]) -> list[VirtualCell] | None:
        for device in prefer:
            place = self._around(device, size)
            if place is not None:
                return place
        return None

    def _around(self, device: PhysicalCell, size: int) -> list[VirtualCell] | None:
        """Return guaranteed devices that can be bound so that a physical device is one of them."""
        if not usable(device, self.suggested):
            return None
        inside = next((c for c in device.ancestors() if c.virtual is not None), None)
        if inside is None:
            part = self._root_for(device, size)
        elif inside.virtual is not None and inside.virtual.holding is self.holding:
            part = next((c for c in inside.virtual.children if c.physical is None), None)
        else:
            part = None  # another virtual cluster holds the cell it is in
        if part is None or part in self.shadows:
            return None
        seed = part.devices[0]
        node = seed
        while node.parent is not None and node.level < self.holding.chain.node_level:
            node = node.parent
        available = self.devices(node)
        if seed not in available or len(available) < size:
            return None
        return nearest(node, size, available, seed)

    def _root_for(self, device: PhysicalCell, size: int) -> VirtualCell | None:
        """Return the smallest unbound guaranteed cell that could get a cell with the device."""
        for cell in device.ancestors():
            if self.holding.unbound[cell.level - 1] and cell.leaves >= size:
                if not self.pool.may_take(cell):
                    continue
                return next(
                    root
                    for root in self.holding.roots
                    if root.level == cell.level and root.physical is None
                )
        return None

    def _preempting(self, size: int, below: int) -> list[VirtualCell] | None:
        """Return devices whose holders have the lowest priorities, and of those the fewest."""
        best: VirtualCell | None = None
        best_cost = (0, 0)
        ideal = (min(self.holding.used), 1)
        for node in self.holding.nodes:
            if node.leaves < size:
                continue
            cost = self._cost(node, size, below)
            if cost is not None and (best is None or cost < best_cost):
                best, best_cost = node, cost
                if cost == ideal:
                    break
        return None if best is None else self._cheapest(best, size, below)

    def _cheapest(self, node: VirtualCell, size: int, below: int) -> list[VirtualCell]:
        return sorted(self.devices(node, below), key=lambda device: device.priority)[:size]

    def _cost(self, node: VirtualCell, size: int, below: int) -> tuple[int, int] | None:
        """Return the highest priority that would have to leave a node, and how many devices."""
        physical = node.physical or self.shadows.get(node)
        special = physical is not None and (physical.bad or self.suggested is not None)
        if special or self._chosen:
            devices = self._cheapest(node, size, below)
            if len(devices) < size:
                return None
            return devices[-1].priority, sum(device.busy for device in devices)
        needed = taken = size - (node.leaves - node.busy)
        if needed <= 0:
            return FREE, 0
        for priority in sorted(node.used):
            if priority >= below:
                break
            needed -= node.used[priority]
            if needed <= 0:
                return priority, taken
        return None


def find_unused(
    nodes: Sequence[PhysicalCell],
    sizes: Sequence[int],
    suggested: Suggested,
    prefer: Sequence[PhysicalCell],
    node_of: Callable[[PhysicalCell], PhysicalCell],
) -> list[list[PhysicalCell]] | None:
    """Find unheld devices for opportunistic pods.

    Nodes with other opportunistic groups come first, and then those where least is held by right of
    a guarantee: a group with a guarantee is more likely to need the neighbouring devices.

    Parameters
    ----------
    nodes
        All of a chain.
    node_of
        Returns the node of a device.
    """
    chosen: dict[PhysicalCell, None] = {}
    places: list[list[PhysicalCell]] = []
    for size in sizes:
        place = None
        if not places:
            place = _around(prefer, size, suggested, node_of)
        place = place or _best_unused(nodes, size, suggested, chosen)
        if place is None:
            return None
        places.append(place)
        chosen.update(dict.fromkeys(place))
    return places


def _unused(node: PhysicalCell, chosen: dict[PhysicalCell, None]) -> dict[PhysicalCell, None]:
    return {d: None for d in node.devices if not d.busy and not d.bad and d not in chosen}


def _around(
    prefer: Sequence[PhysicalCell],
    size: int,
    suggested: Suggested,
    node_of: Callable[[PhysicalCell], PhysicalCell],
) -> list[PhysicalCell] | None:
    near = [device for device in prefer if not device.busy and usable(device, suggested)]
    for start, device in enumerate(near):
        exact = near[start : start + size]
        if len(exact) == size and len({d.node for d in exact}) == 1:
            return exact
        available = _unused(node_of(device), {})
        if len(available) >= size:
            return nearest(node_of(device), size, available, device)
    return None


def _best_unused(
    nodes: Sequence[PhysicalCell],
    size: int,
    suggested: Suggested,
    chosen: dict[PhysicalCell, None],
) -> list[PhysicalCell] | None:
    best, best_key = None, (0, 0)
    for node in nodes:
        if node.leaves - node.busy < size:
            continue
        if (chosen or node.bad) and len(_unused(node, chosen)) < size:
            continue
        if suggested is not None and not usable(node, suggested):
            continue
        others = node.used.get(OPPORTUNISTIC, 0)
        key = (-others, node.busy - others)
        if best is None or key < best_key:
            best, best_key = node, key
    return None if best is None else nearest(best, size, _unused(best, chosen), None)
