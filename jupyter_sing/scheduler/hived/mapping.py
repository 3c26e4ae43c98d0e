"""Mapping of a virtual place to physical cells.

Cells that are bound already stay there. The rest forms trees: a guaranteed cell that is bound to
nothing gets a free cell of its level; a part of a bound cell gets a part of that cell. Physical
cells are chosen such that no group has to leave, if possible; that bad devices are left to groups
that can do without them; and that preferred devices are used.

Whether a virtual cell fits into a physical one does not depend on the other choices around it,
since cells are disjoint. So siblings are assigned by bipartite matching (augmenting paths) instead
of by backtracking over all orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jupyter_sing.scheduler.hived.cells import OPPORTUNISTIC, PhysicalCell, VirtualCell
from jupyter_sing.scheduler.hived.pool import Pool
from jupyter_sing.scheduler.hived.search import Suggested, usable

Bindings = dict[VirtualCell, PhysicalCell]
_Key = tuple[int, int, bool, int, int, bool, int]


class Favour:
    """Preferred devices, and the cells they are in."""

    def __init__(self, devices: Sequence[PhysicalCell]) -> None:
        self.any = {cell: None for device in devices for cell in device.ancestors()}
        self.free = {
            cell: None for device in devices if not device.busy for cell in device.ancestors()
        }


class Mapper:
    """Finds physical devices for virtual ones; changes nothing."""

    def __init__(self, pool: Pool, suggested: Suggested, favour: Favour) -> None:
        self.pool = pool
        self.suggested = suggested
        self.favour = favour
        self.parts: dict[VirtualCell, list[VirtualCell]] = {}
        self.size: dict[VirtualCell, int] = {}

    def map(self, devices: Iterable[VirtualCell]) -> Bindings | None:
        """Return a physical device for each virtual one; None if that is impossible."""
        bindings: Bindings = {}
        roots: list[VirtualCell] = []
        inside: dict[VirtualCell, list[VirtualCell]] = {}  # unbound parts of bound cells
        for device in devices:
            if device.physical is not None:
                bindings[device] = device.physical
                continue
            top = self._plant(device)
            if top is None:
                continue
            if top.parent is None:
                roots.append(top)
            else:
                inside.setdefault(top.parent, []).append(top)
        for parent, parts in inside.items():
            assert parent.physical is not None
            found = self._assign(parts, parent.physical.children)
            if found is None:
                return None
            bindings.update(found)
        taken: list[PhysicalCell] = []
        try:
            for root in sorted(roots, key=lambda r: (-r.level, -self.size[r], r.order)):
                choice = self._from_pool(root)
                if choice is None:
                    return None
                cell, found = choice
                bindings.update(found)
                if len(roots) > 1:
                    self.pool.take(cell)  # so that the next root finds what is left
                    taken.append(cell)
        finally:
            for cell in reversed(taken):
                self.pool.give(cell)
        return bindings

    def _plant(self, device: VirtualCell) -> VirtualCell | None:
        """Add a device to the trees that have to be bound; return the top of a new tree."""
        cell = device
        new = True
        self.parts[cell] = []
        self.size[cell] = 1
        while cell.parent is not None and cell.parent.physical is None:
            parent = cell.parent
            if new:
                siblings = self.parts.get(parent)
                if siblings is None:
                    self.parts[parent] = [cell]
                else:
                    siblings.append(cell)
                    new = False
            self.size[parent] = self.size.get(parent, 0) + 1
            cell = parent
        return cell if new else None

    def _key(self, cell: PhysicalCell, size: int) -> _Key:
        """Return the sort key: groups displaced, damage, preference, size, groups around it."""
        short = size - (cell.leaves - cell.busy - cell.bad)
        return (
            short if short > 0 else 0,
            cell.bad,
            cell not in self.favour.free,
            cell.level,
            cell.used.get(OPPORTUNISTIC, 0),
            cell not in self.favour.any,
            cell.order,
        )

    def _candidates(self, cells: Iterable[PhysicalCell], size: int) -> Iterator[PhysicalCell]:
        """Yield unbound cells in which something may be used, the best first."""
        found: list[PhysicalCell] = []
        best: PhysicalCell | None = None
        best_key: _Key | None = None
        for cell in cells:
            if cell.virtual is not None or not usable(cell, self.suggested):
                continue
            found.append(cell)
            key = self._key(cell, size)
            if best_key is None or key < best_key:
                best, best_key = cell, key
        if best is None:
            return
        yield best  # mostly it fits, and the rest need not be sorted
        for cell in sorted(found, key=lambda cell: self._key(cell, size)):
            if cell is not best:
                yield cell

    def _from_pool(self, root: VirtualCell) -> tuple[PhysicalCell, Bindings] | None:
        for source in self._candidates(self.pool.sources(root.level), self.size[root]):
            for cell in self._pieces(source, root):
                found = self._fit(root, cell)
                if found is not None:
                    return cell, found
        return None

    def _pieces(self, cell: PhysicalCell, root: VirtualCell) -> Iterator[PhysicalCell]:
        """Yield cells of the root's level in a cell, the best first."""
        if cell.level == root.level:
            yield cell
        else:
            for child in self._candidates(cell.children, self.size[root]):
                yield from self._pieces(child, root)

    def _fit(self, virtual: VirtualCell, physical: PhysicalCell) -> Bindings | None:
        if not virtual.children:
            return {virtual: physical}
        return self._assign(self.parts[virtual], physical.children)

    def _assign(
        self, virtuals: Sequence[VirtualCell], physicals: Sequence[PhysicalCell]
    ) -> Bindings | None:
        """Assign each virtual cell its own physical one."""
        if not virtuals[0].children:
            devices = self._candidates(physicals, 1)
            bindings = dict(zip(virtuals, devices, strict=False))
            return bindings if len(bindings) == len(virtuals) else None
        fits: dict[tuple[VirtualCell, PhysicalCell], Bindings | None] = {}
        owners: dict[PhysicalCell, VirtualCell] = {}

        def fitting(virtual: VirtualCell) -> Iterator[PhysicalCell]:
            for cell in self._candidates(physicals, self.size[virtual]):
                if (virtual, cell) not in fits:
                    fits[virtual, cell] = self._fit(virtual, cell)
                if fits[virtual, cell] is not None:
                    yield cell

        def placed(virtual: VirtualCell, tried: dict[PhysicalCell, None]) -> bool:
            for cell in fitting(virtual):
                if cell not in owners:
                    owners[cell] = virtual
                    return True
            for cell in fitting(virtual):  # another virtual cell has to take another physical one
                if cell not in tried:
                    tried[cell] = None
                    if placed(owners[cell], tried):
                        owners[cell] = virtual
                        return True
            return False

        for virtual in sorted(virtuals, key=lambda v: (-self.size[v], v.order)):
            if not placed(virtual, {}):
                return None
        bindings = {}
        for cell, virtual in owners.items():
            found = fits[virtual, cell]
            assert found is not None
            bindings.update(found)
        return bindings
