"""Groups of pods, what they ask for, and what becomes of them.

A group is placed as a whole or not at all (a gang); its pods come and go within its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from jupyter_sing.scheduler.hived.cells import OPPORTUNISTIC, PhysicalCell, Seat, VirtualCell
from jupyter_sing.scheduler.hived.errors import RequestError

HIGHEST_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """So many pods with so many devices each; the devices of a pod are on one node."""

    pods: int
    leaves: int


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What a group asks for.

    Attributes
    ----------
    priority
        -1: opportunistic, of whatever is unused; 0 to 1000: of what its virtual cluster is
        promised.
    leaf_type
        Type of the devices; any if None.
    pinned
        Name of the pinned cell to be used instead of other cells.
    lazy_preemption
        Somebody of its virtual cluster with a higher priority makes it opportunistic, and does not
        end it as long as other devices can be had.
    ignore_suggested
        It may be placed on cordoned nodes.
    any_pinned
        It may be placed in any pinned cell of its virtual cluster, too.
    """

    name: str
    vc: str
    priority: int
    members: tuple[Member, ...]
    leaf_type: str | None = None
    pinned: str | None = None
    lazy_preemption: bool = True
    ignore_suggested: bool = False
    any_pinned: bool = False

    @property
    def guaranteed(self) -> bool:
        return self.priority > OPPORTUNISTIC

    def check(self) -> None:
        """Check what can be checked without knowing the cluster.

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


class Group:
    """A group that has, or waits for, its place.

    Attributes
    ----------
    preempting
        Its place is reserved, and others must leave first.
    downgraded
        Groups that it has made opportunistic, with the promises they held.
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
        self.downgraded: list[tuple[Group, list[VirtualCell]]] = []

    @property
    def seats(self) -> Iterator[Seat]:
        for slot in self.slots:
            yield from slot.seats

    @property
    def guaranteed(self) -> bool:
        """It holds its devices by right of a promise."""
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

    group: Group
    cancelled: tuple[str, ...] = ()
    downgraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """The place of the group is reserved; these groups must be released first. See `Placed`."""

    group: Group
    victims: tuple[Group, ...]
    cancelled: tuple[str, ...] = ()
    downgraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no place now; nothing was changed."""

    reason: str
