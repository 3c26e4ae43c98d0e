"""A policy as its author wrote it: every key, its type, and one sentence about its meaning.

None means that the document does not say it; `resolve` returns what applies then. `math.inf` is
what the document calls ``unlimited`` or ``never``. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from jupyter_sing.scheduler.policy.values import (
    FLAG,
    ByName,
    DocumentRecord,
    NotEmpty,
    OrName,
    Present,
    choice,
    key,
    number,
    quantity,
    required,
    text,
    whole,
)
from jupyter_sing.scheduler.settings import Tier
from kernelproxy.common.units import DURATION_UNITS, SIZE_UNITS

DEVICES_MAX = 10_000

NAME = text("^[A-Za-z0-9][A-Za-z0-9_-]{0,59}$", "a name of at most 60 letters, digits, - and _")
# Name that a hub or an operating system gives a user, or a pattern of such names.
USER = text(r"^\S(.{0,126}\S)?$", "the name of a user, or a pattern such as s-*", numbers=True)
ADDRESS = text(r"^\S(.{0,126}\S)?$", "an address", numbers=True)
TYPE_PATH = text("^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$", "names of cell types, joined by dots")
COUNT = whole(1, DEVICES_MAX)
COUNT_OR_0 = whole(0, DEVICES_MAX)
WEIGHT = number(0.001, 1000)
HOURS = number(0, 24 * DEVICES_MAX)
SIZE = quantity(SIZE_UNITS, "24 GiB", zero=True).or_word("unlimited")
DURATION = quantity(DURATION_UNITS, "10 min")
UNTIL = DURATION.or_word("never")
PAUSE = quantity(DURATION_UNITS, "30 s", zero=True).or_word("never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas(DocumentRecord):
    """Maximum use of resources by a user or virtual cluster."""

    devices: Annotated[float | None, COUNT_OR_0.or_word("unlimited")] = key(
        "Devices held at once. Built in: unlimited.",
        label="devices at once",
    )
    device_memory: Annotated[float | None, SIZE] = key(
        "Memory on devices, of all sessions together. Built in: unlimited.",
        label="device memory",
    )
    gpu_hours_per_day: Annotated[float | None, HOURS.or_word("unlimited")] = key(
        "Hours of device time in any 24 hours. Built in: unlimited.",
        label="GPU-hours a day",
    )
    disk: Annotated[float | None, SIZE] = key(
        "Disk for suspended sessions and checkpoints. Built in: unlimited.",
        label="disk",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTerms(DocumentRecord):
    """Rights of a user."""

    tier: Annotated[Tier | None, choice(Tier)] = key(
        "What is promised: premium, standard or basic. Built in: standard.",
        label="tier",
    )
    weight: Annotated[float | None, WEIGHT] = key(
        "Share among the users of a virtual cluster. Built in: 1.",
        label="weight",
    )
    packing: Annotated[bool | None, FLAG] = key(
        "Whether other sessions may execute on a device together with theirs, while both get on "
        "faster so than by turns. Built in: false.",
        label="packing",
    )
    quotas: Quotas = key("What each user may have, with all their sessions.", Quotas())


@dataclass(frozen=True, slots=True, kw_only=True)
class User(UserTerms):
    """The user of a name, or all users whose names match a pattern; also written as the name."""

    name: Annotated[str, USER] = required("A user, or a pattern with *, ? or [0-9].")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserGroupEntry(UserTerms):
    """Users with the same terms, each of them individually."""

    members: Annotated[tuple[Annotated[str, USER], ...], NotEmpty()] = required(
        "Users, or patterns with *, ? or [0-9]."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UserGroup(UserGroupEntry):
    """A group with its name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuaranteedCells(DocumentRecord):
    """A number of cells of one type; the type is given by its path from a top cell."""

    cell_type: Annotated[str, TYPE_PATH] = required(
        "Path from a top cell's type down, such as RACK.NODE."
    )
    cell_number: Annotated[int, COUNT] = key("How many. Built in: 1.", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualClusterEntry(DocumentRecord):
    """Users who share devices, with what is guaranteed to them together."""

    guaranteed_devices: Annotated[int | None, COUNT_OR_0] = key(
        "Devices that its users can always have, in a cluster of equal hosts. Built in: 0."
    )
    guaranteed_cells: tuple[GuaranteedCells, ...] = key(
        "Cells that its users can always have, in a cluster that is described by cells.", ()
    )
    pinned_cells: tuple[Annotated[str, NAME], ...] = key(
        "Ids of physical cells that are guaranteed only to it.", ()
    )
    weight: Annotated[float | None, WEIGHT] = key(
        "Share of the devices that are not guaranteed. Built in: 1."
    )
    quotas: Quotas = key("What all its users may have together.", Quotas())
    each: UserTerms = key(
        "What each of its users gets, where neither their entry nor their group says it.",
        UserTerms(),
    )
    users: tuple[Annotated[User, OrName(USER)], ...] = key(
        "Who is in it: names, or entries with a name.", ()
    )
    groups: Annotated[tuple[UserGroup, ...], ByName(NAME, UserGroupEntry)] = key(
        "Users with the same terms, by name of the group.", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualCluster(VirtualClusterEntry):
    """A virtual cluster with its name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Others(UserTerms):
    """Terms of users that no virtual cluster names."""

    admitted: Annotated[bool | None, FLAG] = key(
        "Whether they may use devices at all. Built in: true.",
        label="admitted",
    )
    virtual_cluster: Annotated[str | None, NAME] = key(
        "Where they are. Built in: default, which is there with no guarantee if it is not "
        "described.",
        label="virtual cluster",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTerms(DocumentRecord):
    """Target of a tier, and its timeouts."""

    gpu_percent: Annotated[float | None, number(0, 99)] = key(
        "Device time that a session gets, of what it asks for, over a sliding hour; 0: no "
        "promise. Built in: 95, 70 and 0.",
        label="guaranteed GPU time",
    )
    suspend_after: Annotated[float | None, UNTIL] = key(
        "Time without use after which a session's device memory is freed. Built in: 10 min.",
        label="suspended after",
    )
    hibernate_after: Annotated[float | None, UNTIL] = key(
        "Time without use after which the notebook's process is put on disk, too. Built in: never.",
        label="hibernated after",
    )
    max_hold: Annotated[float | None, DURATION.or_word("unlimited")] = key(
        "Time on a device after which a running cell gives way to waiting sessions; it "
        "is suspended, not ended. Built in: unlimited.",
        label="longest hold",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers(DocumentRecord):
    """The three tiers."""

    premium: TierTerms = key("What premium sessions are promised.", TierTerms())
    standard: TierTerms = key("What standard sessions are promised.", TierTerms())
    basic: TierTerms = key("What basic sessions are promised.", TierTerms())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms(DocumentRecord):
    """Terms of jobs of several ranks."""

    grow_after: Annotated[float | None, PAUSE] = key(
        "Time that a device has to be idle, while no session waits that could use it, before a "
        "job of several ranks grows onto it; 0 s: at once. Built in: 30 s.",
        label="grow onto idle devices after",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTypeEntry(DocumentRecord):
    """Composition of a cell type. A type that is not defined is one device."""

    child_cell_type: Annotated[str, NAME] = required(
        "Type of its cells; one that is not defined is a device."
    )
    child_cell_number: Annotated[int, COUNT] = required("How many of them it has.")
    is_node_level: Annotated[bool, FLAG] = key(
        "Whether such a cell is a host. Built in: false.", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CellType(CellTypeEntry):
    """A cell type with its name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCell(DocumentRecord):
    """A cell inside another, where it needs an address or is pinned."""

    cell_address: Annotated[str | None, ADDRESS] = key(
        "Name of a host, or index of a cell within one."
    )
    pinned_cell_id: Annotated[str | None, NAME] = key("By which a virtual cluster can pin it.")
    cell_children: tuple[ChildCell, ...] = key(
        "Its cells, in order, where one of them has an address or an id.", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopCell(ChildCell):
    """A cell that is in no other."""

    cell_type: Annotated[str, NAME] = required("One of cell_types.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy(DocumentRecord):
    """Hosts of equal devices, or cells."""

    hosts: Annotated[int | None, COUNT] = key("Hosts with equal devices. Built in: 1.")
    devices_per_host: Annotated[int | None, COUNT] = key("Devices of each host.")
    cell_types: Annotated[tuple[CellType, ...], ByName(NAME, CellTypeEntry)] = key(
        "Of what cells consist, by type.", ()
    )
    physical_cells: tuple[TopCell, ...] = key(
        "The cells that there are and that are in no other.", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDocument(DocumentRecord):
    """Rules that say who may use which devices; see docs/policy.md."""

    cluster: Annotated[ClusterPolicy | None, Present(ClusterPolicy)] = key(
        "What there is. Without it: what the machine has."
    )
    tiers: Tiers = key("What the three tiers mean.", Tiers())
    jobs: JobTerms = key("What applies to jobs of several ranks.", JobTerms())
    defaults: UserTerms = key(
        "Terms of all users, if nothing more specific sets them.", UserTerms()
    )
    others: Others = key("Those whom no virtual cluster names.", Others())
    virtual_clusters: Annotated[tuple[VirtualCluster, ...], ByName(NAME, VirtualClusterEntry)] = (
        key("Users who share a guarantee, by name.", ())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(PolicyDocument):
    """Policy of an administrator.

    Attributes
    ----------
    lines
        Line in the text of every path of the document; ignored when policies are compared.
    """

    lines: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False, hash=False
    )
