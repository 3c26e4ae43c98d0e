"""Declared cells, the guarantees on them, and the check that those can be kept.

The vocabulary is HiveD's (Zhao et al., OSDI 2020). A *cell* is a set of devices that belong
together: a device, the devices of one switch, a node, a rack. All cells of one *chain* have the
same shape: a cell of level l consists of `fanout` cells of level l - 1, and level 1 is one device.
A virtual cluster is guaranteed a number of cells of given levels, and perhaps *pinned* cells, which
are certain physical ones.

Note "surplus". Sizes within a chain divide each other, so guaranteed cells fit into free ones if
and only if filling from the largest down works. With free[l] free cells of level l, and need[l]
guaranteed ones that are not allocated yet, surplus[l] = free[l] - need[l] + surplus[l + 1] *
fanout[l + 1] must nowhere be negative. It implies totalLeft[l] >= allVCFree[l] at every level, and
is more than that: one cell of level 2 that has two of level 1 cannot be guaranteed twice, as itself
and as its parts, though each number alone would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jupyter_sing.scheduler.hived.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Level:
    """Common properties of all cells of one level of a chain.

    Attributes
    ----------
    type
        Name of the cell type.
    leaves
        Number of devices in such a cell.
    fanout
        Number of cells of the level below in it; 0 for a device.
    """

    type: str
    leaves: int
    fanout: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Shape of equal trees of cells, named by the type of their roots.

    Attributes
    ----------
    levels
        From the device up. Level numbers begin with 1: level l is `levels[l - 1]`.
    node_level
        Level of the cells that are one node each.
    """

    name: str
    levels: tuple[Level, ...]
    node_level: int

    @property
    def top(self) -> int:
        return len(self.levels)

    @property
    def leaf_type(self) -> str:
        return self.levels[0].type

    def level_of(self, cell_type: str) -> int | None:
        """Return the level of a cell type in this chain; None if it is not there."""
        for number, level in enumerate(self.levels, 1):
            if level.type == cell_type:
                return number
        return None


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One declared physical cell with everything in it.

    Attributes
    ----------
    address
        Unique among the cells of this type; of a node: its name.
    node
        Name of the node that it belongs to or is; None above nodes.
    device
        Name of the device, if it is one.
    pinned
        Name by which a virtual cluster may request just this cell.
    """

    chain: str
    level: int
    address: str
    node: str | None
    device: str | None
    pinned: str | None
    children: tuple[CellSpec, ...]


@dataclass(frozen=True, slots=True)
class VirtualCellSpec:
    """A number of guaranteed cells of a level of a chain."""

    chain: str
    level: int
    count: int


@dataclass(frozen=True, slots=True)
class VirtualClusterSpec:
    """Guarantees of one virtual cluster."""

    name: str
    cells: tuple[VirtualCellSpec, ...] = ()
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """A physical cluster and the guarantees on it, which are checked on creation.

    Attributes
    ----------
    chains
        In the order in which they are searched for devices.

    Raises
    ------
    ConfigurationError
        If something is named twice or not at all, or if the guarantees cannot all be kept at once;
        then the message says chain, level and numbers.
    """

    chains: tuple[Chain, ...]
    cells: tuple[CellSpec, ...]
    virtual_clusters: tuple[VirtualClusterSpec, ...]
    _chains: dict[str, Chain] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_chains", {chain.name: chain for chain in self.chains})
        _check_names(self)
        check_guarantees(self)

    def chain(self, name: str) -> Chain:
        """Return the chain of a name.

        Raises
        ------
        ConfigurationError
            If there is none.
        """
        if name not in self._chains:
            raise ConfigurationError(f"No physical cell is of type {name!r}.")
        return self._chains[name]

    @classmethod
    def of_nodes(
        cls, nodes: Mapping[str, Sequence[str]], guarantees: Mapping[str, int]
    ) -> Configuration:
        """Create a configuration of cells for plain nodes, which guarantees numbers of devices.

        The devices of a node are halved (or divided by the smallest prime that divides them) until
        single devices are left. A number of devices is guaranteed in cells as large as it allows:
        of nodes with 8 devices, 13 are a node, a half of a node, and a device. A lease of several
        devices lies within one such cell.

        Parameters
        ----------
        nodes
            Names of nodes, with the names of their devices in the order of their neighbourhood.
        guarantees
            Names of all virtual clusters, with how many devices each is guaranteed (perhaps none).

        Raises
        ------
        ConfigurationError
            If more devices are guaranteed than there are, or names are not unique.
        """
        sizes = sorted({len(devices) for devices in nodes.values()}, reverse=True)
        if 0 in sizes:
            empty = next(name for name, devices in nodes.items() if not devices)
            raise ConfigurationError(f"Node {empty!r} has no devices.")
        chains = {size: _divided(size) for size in sizes}
        cells = tuple(
            _divided_cell(chains[len(devices)], name, devices) for name, devices in nodes.items()
        )
        room = {size: sum(len(d) == size for d in nodes.values()) * size for size in sizes}
        total, wanted = sum(room.values()), sum(guarantees.values())
        if wanted > total:
            raise ConfigurationError(
                f"Virtual clusters are promised {wanted} devices, and there are {total}."
            )
        clusters = []
        for name, count in guarantees.items():
            if count < 0:
                raise ConfigurationError(f"Virtual cluster {name!r} is promised {count} devices.")
            specs = []
            for size in sizes:
                taken = min(count, room[size])
                room[size] -= taken
                count -= taken
                specs += _in_large_cells(chains[size], taken)
            clusters.append(VirtualClusterSpec(name, tuple(specs)))
        return cls(tuple(chains.values()), cells, tuple(clusters))


def free_cells(chain: Chain, cells: Sequence[CellSpec], pinned: frozenset[str]) -> list[int]:
    """Count the largest cells of each level (index 0: level 1) that are free of pinned cells."""
    free = [0] * chain.top
    for root in cells:
        if root.chain == chain.name:
            _count_free(root, pinned, free)
    return free


def check_guarantees(configuration: Configuration) -> None:
    """Check that all guaranteed cells exist at once; see the note "surplus".

    Raises
    ------
    ConfigurationError
        With chain, level and numbers of the highest level at which they do not.
    """
    pinned = frozenset(pid for vc in configuration.virtual_clusters for pid in vc.pinned)
    for chain in configuration.chains:
        free = free_cells(chain, configuration.cells, pinned)
        surplus = 0
        for number in range(chain.top, 0, -1):
            above = chain.levels[number].fanout if number < chain.top else 0
            available = free[number - 1] + surplus * above
            need = sum(
                guarantee.count
                for vc in configuration.virtual_clusters
                for guarantee in vc.cells
                if (guarantee.chain, guarantee.level) == (chain.name, number)
            )
            surplus = available - need
            if surplus < 0:
                raise ConfigurationError(
                    f"Virtual clusters are promised {need} cells of level {number} "
                    f"({chain.levels[number - 1].type}) of chain {chain.name}, and {available} are "
                    "left when pinned cells and what is promised of higher levels are set aside."
                )


def _count_free(cell: CellSpec, pinned: frozenset[str], free: list[int]) -> None:
    if cell.pinned in pinned:
        return
    if _has_pinned(cell, pinned):
        for child in cell.children:
            _count_free(child, pinned, free)
    else:
        free[cell.level - 1] += 1


def _has_pinned(cell: CellSpec, pinned: frozenset[str]) -> bool:
    return cell.pinned in pinned or any(_has_pinned(child, pinned) for child in cell.children)


def _check_names(configuration: Configuration) -> None:
    devices: set[object] = set()
    pins: set[object] = set()
    nodes: set[object] = set()
    waiting = list(configuration.cells)
    while waiting:
        cell = waiting.pop()
        waiting += cell.children
        if cell.level == configuration.chain(cell.chain).node_level:
            _once(nodes, (cell.chain, cell.node), f"Node {cell.node!r} is declared twice.")
        if cell.device is not None:
            problem = f"Device {cell.device!r} is declared twice."
            _once(devices, cell.device, problem)
        if cell.pinned is not None:
            _once(pins, cell.pinned, f"Two cells have the pinned name {cell.pinned!r}.")
    names: set[object] = set()
    claimed: set[object] = set()
    for vc in configuration.virtual_clusters:
        _once(names, vc.name, f"Virtual cluster {vc.name!r} is declared twice.")
        for pid in vc.pinned:
            if pid not in pins:
                raise ConfigurationError(
                    f"{vc.name} has the pinned cell {pid!r}, which is no cell."
                )
            _once(claimed, pid, f"The pinned cell {pid!r} is promised twice.")
        for guarantee in vc.cells:
            if not 1 <= guarantee.level <= configuration.chain(guarantee.chain).top:
                raise ConfigurationError(
                    f"{vc.name} has cells of level {guarantee.level} of chain {guarantee.chain}, "
                    "and there is no such level."
                )
            if guarantee.count < 0:
                raise ConfigurationError(f"{vc.name} is promised {guarantee.count} cells.")


def _once(known: set[object], name: object, problem: str) -> None:
    if name in known:
        raise ConfigurationError(problem)
    known.add(name)


def _divided(size: int) -> Chain:
    """Return a chain of nodes of a size, divided by ever larger primes from the top down."""
    sizes = [size]
    while sizes[-1] > 1:
        rest = sizes[-1]
        sizes.append(rest // next(d for d in range(2, rest + 1) if rest % d == 0))
    sizes.reverse()
    name = f"node-of-{size}"
    levels = tuple(
        Level(
            type=name if number == len(sizes) - 1 else f"{leaves}-of-{size}",
            leaves=leaves,
            fanout=leaves // sizes[number - 1] if number else 0,
        )
        for number, leaves in enumerate(sizes)
    )
    return Chain(name, levels, node_level=len(levels))


def _divided_cell(
    chain: Chain, node: str, devices: Sequence[str], level: int | None = None, at: int = 0
) -> CellSpec:
    number = chain.top if level is None else level
    shape = chain.levels[number - 1]
    below = chain.levels[number - 2].leaves
    return CellSpec(
        chain=chain.name,
        level=number,
        address=node if number == chain.top else f"{node}/{at // shape.leaves}",
        node=node,
        device=devices[at] if number == 1 else None,
        pinned=None,
        children=tuple(
            _divided_cell(chain, node, devices, number - 1, at + index * below)
            for index in range(shape.fanout)
        ),
    )


def _in_large_cells(chain: Chain, devices: int) -> list[VirtualCellSpec]:
    specs = []
    for number in range(chain.top, 0, -1):
        count, devices = divmod(devices, chain.levels[number - 1].leaves)
        if count:
            specs.append(VirtualCellSpec(chain.name, number, count))
    return specs
