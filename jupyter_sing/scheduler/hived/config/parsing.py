"""Configurations from documents in HiveD's form: cell types, physical cells, virtual clusters.

The document is the mapping that a YAML reader makes of such a file::

    physicalCluster:
      cellTypes:
        NODE: {childCellType: GPU, childCellNumber: 4, isNodeLevel: true}
        RACK: {childCellType: NODE, childCellNumber: 2}
      physicalCells:
      - cellType: RACK
        cellChildren: [{cellAddress: node0}, {cellAddress: node1, pinnedCellId: lab}]
    virtualClusters:
      A: {virtualCells: [{cellType: RACK.NODE, cellNumber: 1}], pinnedCells: [{pinnedCellId: lab}]}

Cells without an address are numbered: devices of a node from 0, other cells among those of their
level in the same top-level cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jupyter_sing.scheduler.hived.config.configuration import (
    CellSpec,
    Chain,
    Configuration,
    Level,
    VirtualCellSpec,
    VirtualClusterSpec,
)
from jupyter_sing.scheduler.hived.errors import ConfigurationError

Document = Mapping[str, Any]


def configuration_of(document: Document) -> Configuration:
    """Read a configuration.

    Parameters
    ----------
    document
        With `physicalCluster` and `virtualClusters`, and nothing else.

    Raises
    ------
    ConfigurationError
        If the document is malformed, or the configuration guarantees more than there is.
    """
    _known(document, "The document", "physicalCluster", "virtualClusters")
    physical = document["physicalCluster"]
    _known(physical, "physicalCluster", "cellTypes", "physicalCells")
    types = _types(physical["cellTypes"])
    chains: dict[str, Chain] = {}
    cells = []
    for index, entry in enumerate(physical["physicalCells"]):
        name = entry.get("cellType")
        if name not in types:
            raise ConfigurationError(f"physicalCells[{index}] is of an unknown type, {name!r}.")
        if name not in chains:
            chains[name] = _chain(name, types)
        cells.append(
            _ConfigurationReader(chains[name]).cell(
                entry, chains[name].top, str(index), index, None
            )
        )
    clusters = tuple(
        _virtual_cluster(name, entry or {}, chains, types)
        for name, entry in document["virtualClusters"].items()
    )
    return Configuration(tuple(chains.values()), tuple(cells), clusters)


@dataclass(frozen=True, slots=True)
class _CellType:
    child: str
    number: int
    at_node: bool


def _types(entries: Mapping[str, Document]) -> dict[str, _CellType]:
    types = {}
    for name, entry in entries.items():
        _known(entry, f"Cell type {name}", "childCellType", "childCellNumber", "isNodeLevel")
        number = entry.get("childCellNumber", 0)
        if "childCellType" not in entry or not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"Cell type {name} needs a child type and a number of them.")
        types[name] = _CellType(entry["childCellType"], number, entry.get("isNodeLevel", False))
    return types


def _chain(name: str, types: Mapping[str, _CellType]) -> Chain:
    """Return the levels below a type; a type that is not declared is a device."""
    names = [name]
    while names[-1] in types:
        below = types[names[-1]].child
        if below in names:
            raise ConfigurationError(f"Cell type {below} contains itself.")
        names.append(below)
    names.reverse()
    levels = [Level(names[0], leaves=1, fanout=0)]
    for cell_type in names[1:]:
        number = types[cell_type].number
        levels.append(Level(cell_type, levels[-1].leaves * number, number))
    at_node = [level for level, cell_type in enumerate(names[1:], 2) if types[cell_type].at_node]
    if len(at_node) != 1:
        raise ConfigurationError(
            f"Chain {name} has {len(at_node)} levels of nodes, and must have one."
        )
    return Chain(name, tuple(levels), node_level=at_node[0])


class _ConfigurationReader:
    """Reads one top-level cell."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def cell(
        self, entry: Document, level: int, prefix: str, index: int, node: str | None
    ) -> CellSpec:
        shape = self.chain.levels[level - 1]
        where = f"A cell of type {shape.type}"
        _known(entry, where, "cellType", "cellAddress", "pinnedCellId", "cellChildren")
        if entry.get("cellType", shape.type) != shape.type:
            raise ConfigurationError(f"{where} is declared as {entry['cellType']!r}.")
        own = str(entry.get("cellAddress", index))
        if level == self.chain.node_level:
            node, index = own, 0
        children: Sequence[Document] = entry.get("cellChildren") or [{}] * shape.fanout
        if len(children) != shape.fanout:
            raise ConfigurationError(
                f"{where} has {len(children)} children, and {shape.fanout} by its type."
            )
        return CellSpec(
            chain=self.chain.name,
            level=level,
            address=own if level == self.chain.top else f"{prefix}/{own}",
            node=node,
            device=f"{node}/{own}" if level == 1 else None,
            pinned=entry.get("pinnedCellId"),
            children=tuple(
                self.cell(child, level - 1, f"{prefix}/{own}", index * shape.fanout + i, node)
                for i, child in enumerate(children)
            ),
        )


def _virtual_cluster(
    name: str, entry: Document, chains: Mapping[str, Chain], types: Mapping[str, _CellType]
) -> VirtualClusterSpec:
    _known(entry, f"Virtual cluster {name}", "virtualCells", "pinnedCells")
    guarantees = []
    for cells in entry.get("virtualCells") or ():
        _known(cells, f"virtualCells of {name}", "cellType", "cellNumber")
        path = str(cells["cellType"]).split(".")
        if path[0] not in chains:
            raise ConfigurationError(f"{name} has cells of {path[0]}, and there is no such cell.")
        for above, below in pairwise(path):
            if above not in types or types[above].child != below:
                raise ConfigurationError(f"{name} has cells of {below} in {above}: there are none.")
        level = chains[path[0]].level_of(path[-1])
        assert level is not None, "a path of children ends in the chain"
        guarantees.append(VirtualCellSpec(path[0], level, cells["cellNumber"]))
    pinned = tuple(cell["pinnedCellId"] for cell in entry.get("pinnedCells") or ())
    return VirtualClusterSpec(name, tuple(guarantees), pinned)


def _known(entry: Document, where: str, *keys: str) -> None:
    for key in entry:
        if key not in keys:
            raise ConfigurationError(f"{where} has an unknown key, {key!r}.")
