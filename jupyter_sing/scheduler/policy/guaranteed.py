"""Guarantees of a policy, converted to a `Configuration` of cells.

`hived.config.configuration` checks whether all of them can be kept at once (note "surplus"). This
module finds the part of the document that causes a failure. The package is loaded only for policies
that guarantee something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jupyter_sing.scheduler.policy.errors import PolicyError, quoted
from jupyter_sing.scheduler.policy.model import (
    DEVICES_MAX,
    ChildCell,
    ClusterPolicy,
    Policy,
    VirtualCluster,
)
from jupyter_sing.scheduler.policy.resolve import home_of_others

if TYPE_CHECKING:
    from jupyter_sing.scheduler.hived import Configuration

LEVELS_MAX = 8


def configuration(
    policy: Policy, nodes: Mapping[str, Sequence[str]] | None = None
) -> Configuration | None:
    """Convert the guarantees of a policy to a configuration.

    Parameters
    ----------
    policy : Policy
        A result of `parse`.
    nodes : mapping of str to sequence of str, optional
        Hosts that really exist, with their devices. Without it they are named as the policy counts
        them: ``host0`` with ``host0/gpu0`` and so on. Cells have the policy's addresses.

    Returns
    -------
    Configuration or None
        With all virtual clusters, also those that are guaranteed nothing. None if neither the
        policy nor `nodes` says which devices there are.

    Raises
    ------
    ConfigurationError
        If these nodes are too few for it.
    """
    described = list(policy.virtual_clusters)
    home = home_of_others(policy)
    if home not in described:
        described.append(home)
    return _configuration(policy.cluster, described, nodes)


def check_guarantees(policy: Policy) -> None:
    """Refuse guarantees that cannot all be kept at once.

    Raises
    ------
    PolicyError
        With the level and the numbers.
    """
    cluster, described = policy.cluster, policy.virtual_clusters
    if cluster is None:
        return
    _check_size(policy, cluster)
    problem = _problem(cluster, described)
    if problem is None:
        return
    # Adding virtual clusters never repairs an error of fewer ones: find the first one by bisection.
    fits, wrong = -1, len(described)
    while wrong - fits > 1:
        count = (fits + wrong) // 2
        found = _problem(cluster, described[:count])
        if found is None:
            fits = count
        else:
            wrong, problem = count, found
    path = f"virtual_clusters.{described[wrong - 1].name}" if wrong else "cluster"
    raise PolicyError(path, problem, policy.lines.get(path))


def _problem(cluster: ClusterPolicy, described: Sequence[VirtualCluster]) -> str | None:
    """Return why this cannot be guaranteed; None if it can."""
    from jupyter_sing.scheduler.hived import ConfigurationError

    try:
        _configuration(cluster, described)
    except ConfigurationError as error:
        return str(error).rstrip(".")
    return None


def device_count(cluster: ClusterPolicy) -> int:
    """Return the number of devices of a cluster of equal hosts."""
    return (cluster.hosts or 1) * (cluster.devices_per_host or 0)


def _configuration(
    cluster: ClusterPolicy | None,
    described: Sequence[VirtualCluster],
    nodes: Mapping[str, Sequence[str]] | None = None,
) -> Configuration | None:
    from jupyter_sing.scheduler.hived import Configuration, configuration_of

    if cluster is not None and cluster.physical_cells:
        return configuration_of(_hived(cluster, described))
    if nodes is None:
        if cluster is None:
            return None
        devices = range(cluster.devices_per_host or 0)
        hosts = [f"host{i}" for i in range(cluster.hosts or 1)]
        nodes = {host: [f"{host}/gpu{i}" for i in devices] for host in hosts}
    return Configuration.of_nodes(nodes, {vc.name: vc.guaranteed_devices or 0 for vc in described})


def _check_size(policy: Policy, cluster: ClusterPolicy) -> None:
    """Refuse clusters that would take long to build, before they are built, and unknown types."""
    path, count = "cluster", device_count(cluster)
    sizes: dict[str, int] = {}
    children = {each.name: each for each in cluster.cell_types}
    for index, cell in enumerate(cluster.physical_cells):
        path = f"cluster.physical_cells[{index}]"
        if cell.cell_type not in children:
            path, known = f"{path}.cell_type", ", ".join(children) or "there are none"
            problem = f"must be one of cell_types ({known}), not {quoted(cell.cell_type)}"
            raise PolicyError(path, problem, policy.lines.get(path))
        if cell.cell_type not in sizes:
            levels, size, below = 1, 1, children.get(cell.cell_type)
            while below is not None and levels <= LEVELS_MAX and size <= DEVICES_MAX:
                levels, size = levels + 1, size * below.child_cell_number
                below = children.get(below.child_cell_type)
            if levels > LEVELS_MAX:
                problem = f"has more than {LEVELS_MAX} levels of cells, or contains itself"
                raise PolicyError(path, problem, policy.lines.get(path))
            sizes[cell.cell_type] = size
        count += sizes[cell.cell_type]
        if count > DEVICES_MAX:
            break
    if count > DEVICES_MAX:
        problem = f"makes more than {DEVICES_MAX} devices, which are allowed"
        raise PolicyError(path, problem, policy.lines.get(path))


def _hived(cluster: ClusterPolicy, described: Sequence[VirtualCluster]) -> dict[str, Any]:
    """Convert cells and guarantees to a document in HiveD's form."""
    return {
        "physicalCluster": {
            "cellTypes": {
                each.name: {
                    "childCellType": each.child_cell_type,
                    "childCellNumber": each.child_cell_number,
                    "isNodeLevel": each.is_node_level,
                }
                for each in cluster.cell_types
            },
            "physicalCells": [
                {"cellType": each.cell_type, **_hived_cell(each)} for each in cluster.physical_cells
            ],
        },
        "virtualClusters": {
            vc.name: {
                "virtualCells": [
                    {"cellType": each.cell_type, "cellNumber": each.cell_number}
                    for each in vc.guaranteed_cells
                ],
                "pinnedCells": [{"pinnedCellId": each} for each in vc.pinned_cells],
            }
            for vc in described
        },
    }


def _hived_cell(cell: ChildCell) -> dict[str, Any]:
    found: dict[str, Any] = {"cellChildren": [_hived_cell(each) for each in cell.cell_children]}
    if cell.cell_address is not None:
        found["cellAddress"] = cell.cell_address
    if cell.pinned_cell_id is not None:
        found["pinnedCellId"] = cell.pinned_cell_id
    return found
