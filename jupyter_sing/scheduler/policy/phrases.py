"""Terms as user-facing text, as a document would write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_origin, get_type_hints

from jupyter_sing.scheduler.policy.guaranteed import device_count
from jupyter_sing.scheduler.policy.model import (
    ClusterPolicy,
    JobTerms,
    Others,
    Quotas,
    TierTerms,
    UserTerms,
    VirtualCluster,
)
from jupyter_sing.scheduler.policy.resolve import QUOTAS, EffectiveQuotas
from jupyter_sing.scheduler.policy.values import Value

_RECORDS = (Others, UserTerms, Quotas, TierTerms, JobTerms)

NAMES: Mapping[str, str] = {
    field.name: field.metadata["label"]
    for record in _RECORDS
    for field in fields(record)
    if field.metadata.get("label")
}
"""Of the keys of terms, quotas, tiers and jobs, as users read them."""

# Types of the keys of terms, quotas, tiers and jobs; none of these names has another type
# elsewhere.
_TYPES: Mapping[str, Value] = {
    key: hint.__metadata__[0]
    for record in _RECORDS
    for key, hint in get_type_hints(record, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def value_text(key: str, value: Any) -> str:
    """Format the value of a key as user-facing text."""
    if key == "packing":
        return "allowed" if value else "not allowed"
    if key == "gpu_percent":
        return f"{value:g} %" if value else "none"
    written = _TYPES[key].write(value) if key in _TYPES else value
    return f"{written:g}" if isinstance(written, float) else str(written)


def quotas_text(quotas: EffectiveQuotas) -> str:
    """Format the quotas that limit anything; ``unlimited`` if none does."""
    terms = [
        f"{NAMES[key]} {value_text(key, value)}"
        for key in QUOTAS
        if (value := getattr(quotas, key)) != float("inf")
    ]
    return ", ".join(terms) or "unlimited"


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
