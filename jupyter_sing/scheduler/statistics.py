"""Counters of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the start, and device seconds charged per (virtual cluster, user)."""

    preemptions: int
    switches: int
    evictions: int
    migrations: int
    tier_violations: int
    served: Mapping[tuple[str, str], float]
