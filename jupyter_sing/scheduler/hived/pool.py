"""The free cells of a chain: split on demand, merged when all parts are back (buddy allocation).

"Free" does not say that no group executes there: opportunistic groups use free cells, and
guaranteed cells that are not busy, until a group with a guarantee needs them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

from jupyter_sing.scheduler.hived.cells import PhysicalCell
from jupyter_sing.scheduler.hived.config.configuration import Chain
from jupyter_sing.scheduler.hived.errors import HivedInternalError


def _order(cell: PhysicalCell) -> int:
    return cell.order


class Pool:
    """Physical cells of a chain that are free, and the guaranteed cells still to be allocated.

    All lists have one entry for each level (index 0: level 1).

    Attributes
    ----------
    free
        Free cells that are part of no larger free cell, in their order. As the order is fixed,
        released cells cannot be distinguished from cells that were never taken.
    left
        Number of free cells, counting those that splitting would give: HiveD's totalLeft.
    need
        Number of guaranteed cells that are bound to nothing: HiveD's allVCFree.
    surplus
        See the note "surplus" in `configuration`; never negative.
    bad
        Number of devices of the chain that cannot be used.
    """

    def __init__(
        self,
        chain: Chain,
        roots: Sequence[PhysicalCell],
        need: Sequence[int],
        pinned: Sequence[PhysicalCell],
    ) -> None:
        self.chain = chain
        self.roots = tuple(roots)
        self.bad = 0
        self.free: list[list[PhysicalCell]] = [[] for _ in chain.levels]
        self.free[-1] = list(roots)
        for cell in pinned:
            self._carve(cell)
        self.need = list(need)
        self.left = [0] * chain.top
        self.surplus = [0] * chain.top
        left = surplus = 0
        for index in range(chain.top - 1, -1, -1):
            above = chain.levels[index + 1].fanout if index + 1 < chain.top else 0
            left = len(self.free[index]) + left * above
            surplus = len(self.free[index]) - self.need[index] + surplus * above
            self.left[index], self.surplus[index] = left, surplus
            if surplus < 0:
                raise HivedInternalError(f"Chain {chain.name} was promised away beyond its cells.")

    def level_if_free(self, cell: PhysicalCell) -> int | None:
        """Return the level of the free cell that contains or is this one; None if not free."""
        if cell.taken or cell.split:
            return None
        while cell.parent is not None and not cell.parent.split:
            cell = cell.parent
            if cell.taken:
                return None
        return cell.level

    def may_split(self, level: int, upper: int) -> bool:
        """True if a cell may be split off a free one of a higher level without breaking guarantees.

        HiveD's "safe relaxed" rule. It always holds for the lowest level that has a free cell, as
        long as a cell of this level is owed. Other levels are used when those cells are bad, or
        others are preferred.
        """
        return all(self.surplus[index] > 0 for index in range(level, upper))

    def may_take(self, cell: PhysicalCell) -> bool:
        """True if a cell can be allocated to a virtual cluster that is owed one of its level."""
        upper = self.level_if_free(cell)
        return upper is not None and self.may_split(cell.level, upper)

    def sources(self, level: int) -> Iterator[PhysicalCell]:
        """Yield free cells that may be allocated, or split, for an owed cell of a level."""
        for upper in range(level, self.chain.top + 1):
            if upper > level and self.surplus[upper - 1] < 1:
                return
            yield from self.free[upper - 1]

    def take(self, cell: PhysicalCell) -> None:
        """Allocate a cell of a level of which one is owed.

        Raises
        ------
        InternalError
            If that breaks a guarantee; `may_take` checks that in advance.
        """
        upper = self._carve(cell)
        self._account(cell, upper, -1)
        if min(self.surplus) < 0 or self.need[cell.level - 1] < 0:
            raise HivedInternalError(f"Handing out {cell.address} breaks a promise.")

    def give(self, cell: PhysicalCell) -> None:
        """Take a cell back; it is owed again."""
        cell.taken = False
        merged = cell
        while (parent := merged.parent) is not None:
            if any(sibling.split or sibling.taken for sibling in parent.children):
                break
            for sibling in parent.children:
                if sibling is not merged:
                    self._remove(sibling)
            parent.split = False
            merged = parent
        insort(self.free[merged.level - 1], merged, key=_order)
        self._account(cell, merged.level, 1)

    def damaged(self, level: int) -> list[PhysicalCell]:
        """Return free cells of a level with bad devices, including those from splitting."""
        found: list[PhysicalCell] = []
        waiting = [cell for cells in self.free[level - 1 :] for cell in cells if cell.bad]
        while waiting:
            cell = waiting.pop()
            if cell.level == level:
                found.append(cell)
            else:
                waiting += (child for child in cell.children if child.bad)
        return sorted(found, key=lambda cell: (cell.bad, cell.order))

    def _carve(self, cell: PhysicalCell) -> int:
        """Remove a free cell from the lists; split its ancestors; return the top level split."""
        path = [cell]
        while (parent := path[-1].parent) is not None and not parent.split:
            path.append(parent)
        self._remove(path[-1])
        for inner, outer in pairwise(path):
            outer.split = True
            for child in outer.children:
                if child is not inner:
                    insort(self.free[child.level - 1], child, key=_order)
        cell.taken = True
        return path[-1].level

    def _account(self, cell: PhysicalCell, upper: int, change: int) -> None:
        levels = self.chain.levels
        for index in range(cell.level - 1):
            self.left[index] += change * (cell.leaves // levels[index].leaves)
        for index in range(cell.level - 1, upper):
            self.left[index] += change
        for index in range(cell.level, upper):
            self.surplus[index] += change
        self.need[cell.level - 1] += change

    def _remove(self, cell: PhysicalCell) -> None:
        cells = self.free[cell.level - 1]
        index = bisect_left(cells, cell.order, key=_order)
        if index == len(cells) or cells[index] is not cell:
            raise HivedInternalError(f"{cell.address} is not free.")
        del cells[index]
