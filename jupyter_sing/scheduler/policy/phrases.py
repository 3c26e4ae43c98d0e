"""Terms as user-facing text, as a document would write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jupyter_sing.scheduler.policy.guaranteed import device_count
from jupyter_sing.scheduler.policy.model import ClusterPolicy, VirtualCluster
from jupyter_sing.scheduler.policy.resolve import QUOTAS, EffectiveQuotas
from jupyter_sing.scheduler.policy.schema import KINDS

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "admitted": "admitted",
        "virtual_cluster": "virtual cluster",
        "tier": "tier",
        "weight": "weight",
        "packing": "packing",
        "devices": "devices at once",
        "device_memory": "device memory",
        "gpu_hours_per_day": "GPU-hours a day",
        "disk": "disk",
        "gpu_percent": "guaranteed GPU time",
        "suspend_after": "suspended after",
        "hibernate_after": "hibernated after",
        "max_hold": "longest hold",
    }
)


def value_text(key: str, value: Any) -> str:
    """Format the value of a key as user-facing text."""
    if key == "packing":
        return "allowed" if value else "not allowed"
    if key == "gpu_percent":
        return f"{value:g} %" if value else "none"
    written = KINDS[key].write(value) if key in KINDS else value
    return f"{written:g}" if isinstance(written, float) else str(written)


def quotas_text(quotas: EffectiveQuotas) -> str:
    """Format the quotas that limit anything; ``unlimited`` if none does."""
    said = [
        f"{NAMES[key]} {value_text(key, value)}"
        for key in QUOTAS
        if (value := getattr(quotas, key)) != float("inf")
    ]
    return ", ".join(said) or "unlimited"


def guarantee_text(cluster: VirtualCluster) -> str:
    """Format the guarantees of a virtual cluster."""
    parts = []
    if cluster.guaranteed_devices:
        parts.append(counted(cluster.guaranteed_devices, "device"))
    parts += [f"{each.cell_number} x {each.cell_type}" for each in cluster.guaranteed_cells]
    parts += [f"pinned {each}" for each in cluster.pinned_cells]
    return ", ".join(parts) or "nothing"


def cluster_text(cluster: ClusterPolicy | None) -> str:
    """Format the devices of a cluster."""
    if cluster is None:
        return "the devices of this machine"
    if cluster.physical_cells:
        names = list(dict.fromkeys(cell.cell_type for cell in cluster.physical_cells))
        counts = [sum(c.cell_type == name for c in cluster.physical_cells) for name in names]
        return ", ".join(f"{n} x {name}" for n, name in zip(counts, names, strict=True))
    hosts = cluster.hosts or 1
    each = counted(device_count(cluster) // hosts, "device")
    return f"{counted(hosts, 'host')} of {each}"


def counted(count: int, what: str) -> str:
    """Format a number of things."""
    return f"{count} {what}{'' if count == 1 else 's'}"
