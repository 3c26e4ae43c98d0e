"""Physical and guaranteed cells of a configuration, and the health of the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.scheduler.hived.cells import Holding, PhysicalCell, grow
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.errors import RequestError
from jupyter_sing.scheduler.hived.pool import Pool
from jupyter_sing.scheduler.hived.search import VirtualSearch
from jupyter_sing.scheduler.hived.shadows import shadows


@dataclass(frozen=True, slots=True)
class VirtualCellStatus:
    """A guaranteed cell, as it is shown.

    Attributes
    ----------
    priority
        Highest priority of the groups in it; -2 if there is none.
    bad
        Number of devices of it that cannot be used, or could not if it were needed now.
    address
        Of the physical cell it is bound to.
    """

    chain: str
    level: int
    type: str
    priority: int
    bad: int
    address: str | None


class VirtualClusterCells:
    """Guarantees of one virtual cluster: by chain, and by name of pinned cells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holdings: dict[str, Holding] = {}
        self.pinned: dict[str, Holding] = {}

    @property
    def all_holdings(self) -> list[Holding]:
        return [*self.holdings.values(), *self.pinned.values()]


class Layout:
    """Cells, without the groups that hold them.

    Attributes
    ----------
    devices
        By name.
    pools
        By name of the chain.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.devices: dict[str, PhysicalCell] = {}
        self.virtual_clusters: dict[str, VirtualClusterCells] = {}
        self.pools: dict[str, Pool] = {}
        self._nodes: dict[str, list[PhysicalCell]] = {}
        self._node_of: dict[PhysicalCell, PhysicalCell] = {}
        self._bad_names: dict[str, None] = {}
        self._build()

    def set_health(self, name: str, good: bool) -> None:
        """Mark a device, or all devices of a node, as usable or not.

        A device is good if neither it nor its node was marked as bad. Its holder keeps it.

        Raises
        ------
        RequestError
            If there is neither a device nor a node of that name.
        """
        concerned = self._named(name)
        if good:
            self._bad_names.pop(name, None)
        else:
            self._bad_names[name] = None
        for device in concerned:
            bad = device.device in self._bad_names or device.node in self._bad_names
            if bad != (device.bad > 0):
                change = 1 if bad else -1
                for cell in device.ancestors():
                    cell.bad += change
                self.pools[device.chain.name].bad += change

    @property
    def bad_names(self) -> tuple[str, ...]:
        """Devices and nodes that were marked as bad."""
        return tuple(self._bad_names)

    def guaranteed_cells(self, vc: str) -> list[VirtualCellStatus]:
        """Return all cells that a virtual cluster is guaranteed.

        Raises
        ------
        RequestError
            If there is no such virtual cluster.
        """
        cells = []
        for holding in self.virtual_cluster(vc).all_holdings:
            doomed = shadows(holding, self.pools[holding.chain.name])
            for root in holding.roots:
                physical = root.physical or doomed.get(root)
                cells.append(
                    VirtualCellStatus(
                        chain=holding.chain.name,
                        level=root.level,
                        type=root.type,
                        priority=root.priority,
                        bad=0 if physical is None else physical.bad,
                        address=None if root.physical is None else root.physical.address,
                    )
                )
        return cells

    def unused(self, vc: str) -> int:
        """Return the number of guaranteed devices of a virtual cluster that are unheld and usable.

        Raises
        ------
        RequestError
            If there is no such virtual cluster.
        """
        total = 0
        for holding in self.virtual_cluster(vc).all_holdings:
            pool = self.pools[holding.chain.name]
            total += holding.leaves - holding.busy
            if pool.bad:
                search = VirtualSearch(holding, pool, None)
                total -= holding.leaves - holding.busy
                total += sum(len(search.devices(node)) for node in holding.nodes)
        return total

    def admit(self, vc: str) -> None:
        """Add a virtual cluster; one that is not in the configuration is guaranteed nothing."""
        if vc not in self.virtual_clusters:
            self.virtual_clusters[vc] = VirtualClusterCells(vc)

    def virtual_cluster(self, name: str) -> VirtualClusterCells:
        """Return the virtual cluster of a name.

        Raises
        ------
        RequestError
            If there is none of that name.
        """
        if name not in self.virtual_clusters:
            raise RequestError(f"There is no virtual cluster {name!r}.")
        return self.virtual_clusters[name]

    def _build(self) -> None:
        configuration = self.configuration
        claimed = {pid: vc.name for vc in configuration.virtual_clusters for pid in vc.pinned}
        pinned: dict[str, PhysicalCell] = {}
        for chain in configuration.chains:
            orders = [0] * chain.top
            roots = [grow(chain, c, orders) for c in configuration.cells if c.chain == chain.name]
            set_aside = []
            nodes: list[PhysicalCell] = []
            waiting = roots[::-1]
            while waiting:
                cell = waiting.pop()
                waiting += reversed(cell.children)
                if cell.level == chain.node_level:
                    nodes.append(cell)
                    self._node_of.update(dict.fromkeys(cell.devices, cell))
                if cell.device is not None:
                    self.devices[cell.device] = cell
                if cell.pinned in claimed:
                    pinned[cell.pinned] = cell
                    set_aside.append(cell)
            need = [0] * chain.top
            for vc in configuration.virtual_clusters:
                for guarantee in vc.cells:
                    if guarantee.chain == chain.name:
                        need[guarantee.level - 1] += guarantee.count
            self._nodes[chain.name] = nodes
            self.pools[chain.name] = Pool(chain, roots, need, set_aside)
        for spec in configuration.virtual_clusters:
            cluster = self.virtual_clusters[spec.name] = VirtualClusterCells(spec.name)
            for guarantee in spec.cells:
                if not guarantee.count:
                    continue
                if guarantee.chain not in cluster.holdings:
                    chain = configuration.chain(guarantee.chain)
                    cluster.holdings[guarantee.chain] = Holding(spec.name, chain)
                for _ in range(guarantee.count):
                    cluster.holdings[guarantee.chain].add(guarantee.level)
            for pid in spec.pinned:
                cluster.pinned[pid] = _pinned_holding(spec.name, pid, pinned[pid])

    def _named(self, name: str) -> list[PhysicalCell]:
        if name in self.devices:
            return [self.devices[name]]
        nodes = [node for nodes in self._nodes.values() for node in nodes if node.node == name]
        if not nodes:
            raise RequestError(f"There is neither a device nor a node {name!r}.")
        return [device for node in nodes for device in node.devices]


def _pinned_holding(vc: str, pid: str, cell: PhysicalCell) -> Holding:
    """Return the guarantee of a pinned cell: bound for ever."""
    holding = Holding(vc, cell.chain, pid)
    root = holding.add(cell.level)
    root.fixed = True
    root.physical, cell.virtual = cell, root
    holding.unbound[cell.level - 1] -= 1
    return holding
