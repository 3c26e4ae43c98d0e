"""Guarantees of a policy on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jupyter_sing.scheduler.policy import Policy, configuration
from kernelproxy.common.errors import ControlError

if TYPE_CHECKING:
    from jupyter_sing.scheduler.hived import CellSpec, Configuration

Nodes = Mapping[str, Sequence[str]]


def guaranteed_configuration(policy: Policy, nodes: Nodes) -> Configuration | None:
    """Return the guarantees of a policy on this host; None: nothing is guaranteed.

    Cells are those of this host if they describe one host with as many devices; then their devices
    are this host's, in their order.

    Parameters
    ----------
    policy : Policy
    nodes : mapping of str to sequence of str
        Present hosts, with their devices.

    Raises
    ------
    ControlError
        ``bad-policy``, with the numbers, if this host does not have the guaranteed devices.
    """
    clusters = policy.virtual_clusters
    if not any(c.guaranteed_devices or c.guaranteed_cells or c.pinned_cells for c in clusters):
        return None
    from jupyter_sing.scheduler.hived import ConfigurationError

    devices = [device for found in nodes.values() for device in found]
    try:
        found = configuration(policy, nodes)
    except ConfigurationError as error:
        raise _refusal(str(error), devices) from None
    if found is None or policy.cluster is None or not policy.cluster.physical_cells:
        return found
    described = [leaf for cell in found.cells for leaf in leaves(cell)]
    hosts = list(dict.fromkeys(leaf.node for leaf in described))
    if len(hosts) != len(nodes) or len(described) != len(devices):
        names = ", ".join(str(host) for host in hosts)
        raise _refusal(f"It describes {len(described)} devices of {names}.", devices)
    here = iter(devices)
    return replace(found, cells=tuple(_renamed(cell, here) for cell in found.cells))


def _refusal(why: str, devices: Sequence[str]) -> ControlError:
    count = f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
    return ControlError(
        f"cluster: This daemon has {count} ({', '.join(devices)}), too few for what is guaranteed. "
        f"{why} Guarantee less, or describe these by cluster: "
        f"{{devices_per_host: {len(devices)}}}.",
        "bad-policy",
    )


def leaves(cell: CellSpec) -> list[CellSpec]:
    """Return the devices of a cell."""
    return [leaf for child in cell.children for leaf in leaves(child)] or [cell]


def _renamed(cell: CellSpec, devices: Iterator[str]) -> CellSpec:
    """Rename the devices of a cell, in their order."""
    if not cell.children:
        return replace(cell, device=next(devices))
    return replace(cell, children=tuple(_renamed(child, devices) for child in cell.children))
