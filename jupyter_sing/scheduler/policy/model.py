"""A policy as its author wrote it: frozen, typed, without defaults.

None means that the document does not say it; `resolve` returns what applies then. `math.inf` is
what the document calls ``unlimited`` or ``never``. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jupyter_sing.scheduler.settings import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Maximum use of resources by a user or virtual cluster.

    Attributes
    ----------
    devices
        Held at once.
    device_memory
        Bytes on devices, of all sessions together.
    gpu_hours_per_day
        Hours of device time in any 24 hours.
    disk
        Bytes of suspended sessions and checkpoints.
    """

    devices: float | None = None
    device_memory: float | None = None
    gpu_hours_per_day: float | None = None
    disk: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTerms:
    """Rights of a user.

    Attributes
    ----------
    tier
        Tier of their sessions.
    weight
        Their share among the users of their virtual cluster.
    packing
        True if other sessions may execute on a device together with theirs.
    quotas
        Limits of all their sessions together.
    """

    tier: Tier | None = None
    weight: float | None = None
    packing: bool | None = None
    quotas: Quotas = Quotas()


@dataclass(frozen=True, slots=True, kw_only=True)
class User(UserTerms):
    """The user of a name, or all users whose names match a pattern (``*``, ``?``, ``[0-9]``)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserGroup(UserTerms):
    """Users with the same terms, each of them individually."""

    name: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuaranteedCells:
    """A number of cells of one type; the type is given by its path from a top cell."""

    cell_type: str
    cell_number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualCluster:
    """Users who share devices, with what is guaranteed to them together.

    Attributes
    ----------
    guaranteed_devices
        In a cluster of equal hosts.
    guaranteed_cells, pinned_cells
        In a cluster that is described by cells.
    weight
        Its share among the virtual clusters, of the devices that are not guaranteed.
    quotas
        Limits of all its users together.
    each
        Terms of its users, where neither their entry nor their group says otherwise.
    """

    name: str
    guaranteed_devices: int | None = None
    guaranteed_cells: tuple[GuaranteedCells, ...] = ()
    pinned_cells: tuple[str, ...] = ()
    weight: float | None = None
    quotas: Quotas = Quotas()
    each: UserTerms = UserTerms()
    users: tuple[User, ...] = ()
    groups: tuple[UserGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Others(UserTerms):
    """Terms of users that no virtual cluster names."""

    admitted: bool | None = None
    virtual_cluster: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTerms:
    """Target of a tier, and its timeouts.

    Attributes
    ----------
    gpu_percent
        Percentage of its device time demand that a session gets, over a sliding hour; 0: no target.
    suspend_after, hibernate_after
        Seconds without use.
    max_hold
        Seconds after which a running cell gives way to any waiting session.
    """

    gpu_percent: float | None = None
    suspend_after: float | None = None
    hibernate_after: float | None = None
    max_hold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The three tiers."""

    premium: TierTerms = TierTerms()
    standard: TierTerms = TierTerms()
    basic: TierTerms = TierTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellType:
    """Composition of a cell type. A type that is not defined is one device."""

    name: str
    child_cell_type: str
    child_cell_number: int
    is_node_level: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCell:
    """A cell inside another, where it needs an address or is pinned."""

    cell_address: str | None = None
    pinned_cell_id: str | None = None
    cell_children: tuple[ChildCell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopCell(ChildCell):
    """A cell that is in no other."""

    cell_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """Hosts of equal devices, or cells."""

    hosts: int | None = None
    devices_per_host: int | None = None
    cell_types: tuple[CellType, ...] = ()
    physical_cells: tuple[TopCell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policy of an administrator.

    Attributes
    ----------
    lines
        Line in the text of every path of the document; ignored when policies are compared.
    """

    cluster: ClusterPolicy | None = None
    tiers: Tiers = Tiers()
    defaults: UserTerms = UserTerms()
    others: Others = Others()
    virtual_clusters: tuple[VirtualCluster, ...] = ()
    lines: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False, hash=False
    )
