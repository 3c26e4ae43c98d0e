"""Physical and virtual cells; groups of pods, and the devices that they hold.

A physical cell exists; a virtual one is a guarantee. A virtual cell is *bound* to a physical one of
the same level as long as devices in it are held by right of the guarantee, and so are all its
ancestors, each to the ancestor of the other. What is not held is bound to nothing, so that the
guarantee can be met with whatever is free at that time. Only pinned cells are bound for ever.

The following is derived rather than stored, so that it cannot disagree: the state of a device
follows from the seat that holds it and the seat for which it is reserved; "bound" of a virtual cell
that is not pinned is the same as "busy".

A group is placed as a whole or not at all (a gang); its pods come and go within its place. Cells
and groups refer to each other, so they are in the same module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from jupyter_sing.scheduler.hived.config.configuration import CellSpec, Chain
from jupyter_sing.scheduler.hived.errors import RequestError

OPPORTUNISTIC = -1
FREE = -2  # below every priority: not held


class CellState(Enum):
    """State of a device; the words are HiveD's."""

    FREE = "Free"
    USED = "Used"
    RESERVING = "Reserving"  # used by one group, and reserved for another that waits for it
    RESERVED = "Reserved"


class Seat:
    """A device that a group holds, or waits for.

    Attributes
    ----------
    virtual
        The guaranteed cell by which it is held; None if it is held opportunistically.
    """

    __slots__ = ("group", "physical", "virtual")

    def __init__(
        self, group: AffinityGroup, physical: PhysicalCell, virtual: VirtualCell | None
    ) -> None:
        self.group = group
        self.physical = physical
        self.virtual = virtual

    @property
    def priority(self) -> int:
        return OPPORTUNISTIC if self.virtual is None else self.group.request.priority


class _Cell:
    """Base of physical and virtual cells.

    Attributes
    ----------
    order
        Position among all cells of its level and chain (of its virtual cluster): breaks ties.
    leaves
        Number of devices in it.
    busy
        Number of those that are held (or reserved).
    used
        The same for each priority.
    """

    __slots__ = ("busy", "chain", "leaves", "level", "order", "used")

    def __init__(self, chain: Chain, level: int, order: int) -> None:
        self.chain = chain
        self.level = level
        self.order = order
        self.leaves = chain.levels[level - 1].leaves
        self.busy = 0
        self.used: dict[int, int] = {}

    @property
    def priority(self) -> int:
        """Highest priority of all groups that hold devices in it."""
        return max(self.used, default=FREE)

    @property
    def type(self) -> str:
        return self.chain.levels[self.level - 1].type

    def count(self, priority: int, change: int) -> None:
        """Record that a group of a priority took (1) or left (-1) a device in it."""
        self.busy += change
        left = self.used.get(priority, 0) + change
        if left:
            self.used[priority] = left
        else:
            del self.used[priority]


class PhysicalCell(_Cell):
    """A set of devices.

    Attributes
    ----------
    nodes
        Names of the nodes that it spans.
    bad
        Number of devices in it that cannot be used.
    taken
        It is allocated to a virtual cluster as a whole.
    split
        Its parts are allocated, or free, one by one. Of every path down from a root, the first cell
        that is not split is either taken or free.
    virtual
        The virtual cell that is bound to it.
    user, reserver
        Of a device: the seat that holds it, and the seat that will.
    """

    __slots__ = (
        "address", "bad", "children", "device", "devices", "nodes", "parent", "pinned", "reserver",
        "split", "taken", "user", "virtual",
    )  # fmt: skip

    def __init__(
        self, chain: Chain, spec: CellSpec, order: int, parent: PhysicalCell | None
    ) -> None:
        super().__init__(chain, spec.level, order)
        self.address = spec.address
        self.device = spec.device
        self.pinned = spec.pinned
        self.parent = parent
        self.children: tuple[PhysicalCell, ...] = ()
        self.devices: tuple[PhysicalCell, ...] = ()
        self.nodes: tuple[str, ...] = () if spec.node is None else (spec.node,)
        self.bad = 0
        self.taken = False
        self.split = False
        self.virtual: VirtualCell | None = None
        self.user: Seat | None = None
        self.reserver: Seat | None = None

    @property
    def node(self) -> str:
        """Name of its node, if it is not larger than one."""
        return self.nodes[0]

    @property
    def state(self) -> CellState:
        """State of a device."""
        if self.reserver is None:
            return CellState.FREE if self.user is None else CellState.USED
        return CellState.RESERVED if self.user is None else CellState.RESERVING

    def ancestors(self) -> Iterator[PhysicalCell]:
        """Yield the cell itself, and all cells that contain it."""
        cell: PhysicalCell | None = self
        while cell is not None:
            yield cell
            cell = cell.parent


class VirtualCell(_Cell):
    """A guaranteed cell, or a part of one.

    Attributes
    ----------
    root
        The guaranteed cell that it is part of.
    fixed
        It is bound for ever: a pinned cell.
    """

    __slots__ = ("children", "devices", "fixed", "holding", "parent", "physical", "root")

    def __init__(
        self, holding: Holding, level: int, order: int, parent: VirtualCell | None
    ) -> None:
        super().__init__(holding.chain, level, order)
        self.holding = holding
        self.parent = parent
        self.root: VirtualCell = self if parent is None else parent.root
        self.children: tuple[VirtualCell, ...] = ()
        self.devices: tuple[VirtualCell, ...] = ()
        self.physical: PhysicalCell | None = None
        self.fixed = False


class Holding:
    """Guaranteed cells of a virtual cluster in one chain, or one pinned cell.

    Attributes
    ----------
    nodes
        Cells that are searched for devices: those of node level, and smaller guaranteed cells.
    unbound
        Number of guaranteed cells that are bound to nothing, for each level (index 0: level 1).
    """

    def __init__(self, vc: str, chain: Chain, pinned: str | None = None) -> None:
        self.vc = vc
        self.chain = chain
        self.pinned = pinned
        self.roots: list[VirtualCell] = []
        self.nodes: list[VirtualCell] = []
        self.unbound = [0] * chain.top
        self.busy = 0
        self.leaves = 0
        self.used: dict[int, int] = {}
        self._orders = [0] * chain.top

    def add(self, level: int) -> VirtualCell:
        """Guarantee one more cell."""
        root = self._grown(level, None)
        self.roots.append(root)
        self.leaves += root.leaves
        self.unbound[level - 1] += 1
        return root

    def _grown(self, level: int, parent: VirtualCell | None) -> VirtualCell:
        cell = VirtualCell(self, level, self._orders[level - 1], parent)
        self._orders[level - 1] += 1
        if level == self.chain.node_level or (parent is None and level < self.chain.node_level):
            self.nodes.append(cell)
        fanout = self.chain.levels[level - 1].fanout
        cell.children = tuple(self._grown(level - 1, cell) for _ in range(fanout))
        cell.devices = (
            tuple(device for child in cell.children for device in child.devices)
            if cell.children
            else (cell,)
        )
        return cell

    def count(self, priority: int, change: int) -> None:
        """Record that one of its devices was taken (1) or left (-1) by right of the guarantee."""
        self.busy += change
        left = self.used.get(priority, 0) + change
        if left:
            self.used[priority] = left
        else:
            del self.used[priority]


def grow(chain: Chain, spec: CellSpec, orders: list[int]) -> PhysicalCell:
    """Create a physical cell with everything in it.

    Parameters
    ----------
    orders
        The next position of each level (index 0: level 1); advanced by this call.
    """

    def grown(spec: CellSpec, parent: PhysicalCell | None) -> PhysicalCell:
        cell = PhysicalCell(chain, spec, orders[spec.level - 1], parent)
        orders[spec.level - 1] += 1
        cell.children = tuple(grown(child, cell) for child in spec.children)
        if cell.children:
            cell.devices = tuple(d for child in cell.children for d in child.devices)
            if not cell.nodes:
                cell.nodes = tuple(name for child in cell.children for name in child.nodes)
        else:
            cell.devices = (cell,)
        return cell

    return grown(spec, None)


HIGHEST_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A number of pods with a number of devices each; the devices of a pod are on one node."""

    pods: int
    leaves: int


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request of a group.

    Attributes
    ----------
    priority
        -1: opportunistic, from all unused devices; 0 to 1000: from what its virtual cluster is
        guaranteed.
    leaf_type
        Type of the devices; any if None.
    pinned
        Name of the pinned cell to be used instead of other cells.
    lazy_preemption
        A group of its virtual cluster with a higher priority makes it opportunistic, and does not
        end it as long as other devices are available.
    ignore_suggested
        It may be placed on cordoned nodes.
    any_pinned
        It may be placed in any pinned cell of its virtual cluster, too.
    """

    name: str
    vc: str
    priority: int
    members: tuple[GroupMember, ...]
    leaf_type: str | None = None
    pinned: str | None = None
    lazy_preemption: bool = True
    ignore_suggested: bool = False
    any_pinned: bool = False

    @property
    def guaranteed(self) -> bool:
        return self.priority > OPPORTUNISTIC

    def check(self) -> None:
        """Check what can be checked without a cluster.

        Raises
        ------
        RequestError
            With what is wrong.
        """
        if not OPPORTUNISTIC <= self.priority <= HIGHEST_PRIORITY:
            raise RequestError(
                f"{self.name} has priority {self.priority}; -1 to {HIGHEST_PRIORITY} are possible."
            )
        if not self.members or any(m.pods < 1 or m.leaves < 1 for m in self.members):
            raise RequestError(f"{self.name} asks for no devices.")
        if self.pinned is not None and not self.guaranteed:
            raise RequestError(f"{self.name} is opportunistic, and cannot have a pinned cell.")


class GroupState(Enum):
    """State of a group; the words are HiveD's."""

    PENDING = "Pending"  # nothing is held or reserved for it
    PREEMPTING = "Preempting"  # its place is reserved; others must leave first
    ALLOCATED = "Allocated"
    BEING_PREEMPTED = "BeingPreempted"  # it holds its place, of which others have reserved devices


class Slot:
    """The place of one pod."""

    __slots__ = ("leaves", "pod", "seats")

    def __init__(self, leaves: int, seats: Sequence[Seat]) -> None:
        self.leaves = leaves
        self.seats = tuple(seats)  # fewer than `leaves` when devices are no longer configured
        self.pod: str | None = None


class AffinityGroup:
    """A group that has its place, or waits for it.

    Attributes
    ----------
    preempting
        Its place is reserved, and others must leave first.
    downgraded
        Groups that it has made opportunistic, with the guaranteed cells that they held.
    """

    def __init__(
        self,
        request: GroupRequest,
        places: Sequence[Sequence[tuple[PhysicalCell, VirtualCell | None]]],
    ) -> None:
        self.request = request
        self.slots = tuple(
            Slot(len(place), [Seat(self, physical, virtual) for physical, virtual in place])
            for place in places
        )
        self.preempting = False
        self.downgraded: list[tuple[AffinityGroup, list[VirtualCell]]] = []

    @property
    def seats(self) -> Iterator[Seat]:
        for slot in self.slots:
            yield from slot.seats

    @property
    def guaranteed(self) -> bool:
        """True if it holds its devices by right of a guarantee."""
        return any(seat.virtual is not None for seat in self.seats)

    @property
    def state(self) -> GroupState:
        if self.preempting:
            return GroupState.PREEMPTING
        if any(seat.physical.reserver is not None for seat in self.seats):
            return GroupState.BEING_PREEMPTED
        return GroupState.ALLOCATED

    @property
    def pods(self) -> tuple[str, ...]:
        return tuple(slot.pod for slot in self.slots if slot.pod is not None)


@dataclass(frozen=True, slots=True)
class Placed:
    """The group holds its place.

    Attributes
    ----------
    cancelled
        Groups whose reservations ended by this.
    downgraded
        Groups that are opportunistic from now on.
    """

    group: AffinityGroup
    cancelled: tuple[str, ...] = ()
    downgraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """The place of the group is reserved; these groups must be released first. See `Placed`."""

    group: AffinityGroup
    victims: tuple[AffinityGroup, ...]
    cancelled: tuple[str, ...] = ()
    downgraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupWaiting:
    """There is no place now; nothing was changed."""

    reason: str
