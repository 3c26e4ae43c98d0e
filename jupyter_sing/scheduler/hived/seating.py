"""Bookkeeping of seats: keeps bindings, counts and the pool consistent.

Every change of holders goes through `sit` and `leave`; nothing else binds cells.
"""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_sing.scheduler.hived.cells import AffinityGroup, PhysicalCell, Seat, VirtualCell
from jupyter_sing.scheduler.hived.errors import HivedInternalError
from jupyter_sing.scheduler.hived.pool import Pool


class Seating:
    """Seats of one cluster.

    Parameters
    ----------
    pools
        Of each chain, by its name.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = pools

    def sit(self, seat: Seat) -> None:
        """Count a seat, and bind its cells if it is held by right of a guarantee."""
        priority = seat.priority
        for cell in seat.physical.ancestors():
            cell.count(priority, 1)
        if seat.virtual is None:
            return
        virtual: VirtualCell | None = seat.virtual
        while virtual is not None:
            virtual.count(priority, 1)
            virtual = virtual.parent
        seat.virtual.holding.count(priority, 1)
        self._bind(seat.virtual, seat.physical)

    def leave(self, seat: Seat) -> None:
        """Undo `sit`. The seat must be unchanged since then."""
        priority = seat.priority
        for cell in seat.physical.ancestors():
            cell.count(priority, -1)
        if seat.virtual is None:
            return
        virtual: VirtualCell | None = seat.virtual
        while virtual is not None:
            virtual.count(priority, -1)
            virtual = virtual.parent
        seat.virtual.holding.count(priority, -1)
        self._unbind(seat.virtual)

    def reseat(self, seat: Seat, virtual: VirtualCell | None) -> None:
        """Change the right by which a device is held."""
        self.leave(seat)
        seat.virtual = virtual
        self.sit(seat)

    def downgrade(self, group: AffinityGroup) -> list[VirtualCell]:
        """Let a group keep its devices, but not its guarantees.

        Returns
        -------
        list of VirtualCell
            What `upgrade` needs to undo it.
        """
        virtuals = []
        for seat in group.seats:
            if seat.virtual is None:
                raise HivedInternalError(f"{group.request.name} has nothing to lose.")
            virtuals.append(seat.virtual)
            self.reseat(seat, None)
        return virtuals

    def upgrade(self, group: AffinityGroup, virtuals: list[VirtualCell]) -> bool:
        """Let an opportunistic group hold its devices by right of guarantees, if they allow it.

        Returns
        -------
        bool
            True if they did; otherwise nothing was changed.
        """
        done: list[Seat] = []
        for seat, virtual in zip(group.seats, virtuals, strict=True):
            if not self.may_bind(virtual, seat.physical):
                for undone in reversed(done):
                    self.reseat(undone, None)
                return False
            self.reseat(seat, virtual)
            done.append(seat)
        return True

    def may_bind(self, virtual: VirtualCell, physical: PhysicalCell) -> bool:
        """True if a virtual device could be bound to a physical one without breaking anything."""
        if virtual.busy or virtual.chain is not physical.chain:
            return False
        guaranteed: VirtualCell | None = virtual
        cell: PhysicalCell | None = physical
        while guaranteed is not None and cell is not None:
            if guaranteed.physical is not None:
                return guaranteed.physical is cell
            if cell.virtual is not None:
                return False
            if guaranteed.parent is None:
                return self.pools[cell.chain.name].may_take(cell)
            guaranteed, cell = guaranteed.parent, cell.parent
        return False

    def _bind(self, device: VirtualCell, at: PhysicalCell) -> None:
        virtual: VirtualCell | None = device
        cell: PhysicalCell | None = at
        while virtual is not None and virtual.physical is None:
            if cell is None or cell.virtual is not None or cell.level != virtual.level:
                raise HivedInternalError(f"{at.address} cannot be bound.")
            virtual.physical, cell.virtual = cell, virtual
            if virtual.parent is None:
                self.pools[cell.chain.name].take(cell)
                virtual.holding.unbound[virtual.level - 1] -= 1
            virtual, cell = virtual.parent, cell.parent
        if virtual is not None and virtual.physical is not cell:
            raise HivedInternalError(f"{at.address} is not where its virtual cell is bound.")

    def _unbind(self, device: VirtualCell) -> None:
        virtual: VirtualCell | None = device
        while virtual is not None and not virtual.busy and not virtual.fixed:
            cell = virtual.physical
            if cell is None:
                raise HivedInternalError("A virtual cell was held and bound to nothing.")
            virtual.physical = cell.virtual = None
            if virtual.parent is None:
                self.pools[cell.chain.name].give(cell)
                virtual.holding.unbound[virtual.level - 1] += 1
            virtual = virtual.parent
