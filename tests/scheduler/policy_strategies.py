"""Policies for tests: strategies that make valid ones, and the example files."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st

from jupyter_sing.scheduler.policy.model import (
    CellType,
    ChildCell,
    ClusterPolicy,
    GuaranteedCells,
    JobTerms,
    Others,
    Policy,
    Quotas,
    Tiers,
    TierTerms,
    TopCell,
    User,
    UserGroup,
    UserTerms,
    VirtualCluster,
)
from jupyter_sing.scheduler.settings import Tier

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = {
    name: (DOCS / "policies" / f"{name}.yaml").read_text("utf-8")
    for name in ("laptop", "lab", "course", "departments")
}

# The same cases on every machine and run: a test that fails for one developer fails for all.
# Failing policies are shown as they are, since shrinking them takes minutes.
STEADY = settings(deadline=None, derandomize=True, database=None, phases=(Phase.generate,))

# Names that YAML, or a version of it, reads as another type.
ODD_NAMES = (
    "no", "null", "~", "true", "007", "1e5", "0x1f", ".inf", "12:30", "2026-01-01", "=", "<<",
    "a: b", "a #b", "- a", "*", "&a", "!t", "'", '"', "%", "@a", "{", "[", "é", "漢字", "a\\b",
)  # fmt: skip


def _maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


names = st.from_regex("[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True)
users = st.sampled_from(ODD_NAMES) | st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=9
)
counts = st.integers(0, 99_999) | st.just(math.inf)
sizes = counts.map(lambda count: count * (1 << 20))
durations = st.integers(1, 999_999) | st.integers(1, 999).map(lambda d: d * 86400)

quotas = st.builds(
    Quotas,
    devices=_maybe(st.integers(0, 10_000) | st.just(math.inf)),
    device_memory=_maybe(sizes),
    gpu_hours_per_day=_maybe(st.floats(0, 1000) | st.just(math.inf)),
    disk=_maybe(sizes),
)
_terms = {
    "tier": _maybe(st.sampled_from(Tier)),
    "weight": _maybe(st.floats(0.001, 1000)),
    "packing": _maybe(st.booleans()),
    "quotas": quotas,
}
terms = st.builds(UserTerms, **_terms)


@st.composite
def tier_terms(draw: st.DrawFn) -> TierTerms:
    suspend = draw(_maybe(durations))
    hibernate = draw(_maybe(st.sampled_from((1, 60)).map(lambda times: (suspend or 600) * times)))
    return TierTerms(
        gpu_percent=70.0,
        suspend_after=suspend,
        hibernate_after=draw(st.sampled_from((hibernate, math.inf))),
        max_hold=draw(_maybe(durations | st.just(math.inf))),
    )


_OTHER_NODES = tuple(ChildCell(cell_address=f"1.0.0.{i}") for i in range(3))
_RACK = ClusterPolicy(
    cell_types=(
        CellType(name="node", child_cell_type="gpu", child_cell_number=2, is_node_level=True),
        CellType(name="rack", child_cell_type="node", child_cell_number=3),
    ),
    physical_cells=(
        TopCell(
            cell_type="rack",
            cell_children=(
                ChildCell(cell_address="n1", pinned_cell_id="mine"),
                ChildCell(cell_address="2", cell_children=(ChildCell(), ChildCell())),
                ChildCell(cell_address="n 3"),
            ),
        ),
        TopCell(cell_type="rack", cell_address="second", cell_children=_OTHER_NODES),
    ),
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Valid policies: every user is named once, and guarantees are possible."""
    cluster_names = draw(st.lists(names, unique=True, max_size=3))
    user_names = draw(st.lists(users, unique=True, max_size=8))
    form = draw(st.sampled_from(("none", "hosts", "cells")))
    clusters = []
    for index, name in enumerate(cluster_names):
        mine = user_names[index :: len(cluster_names)]
        cut = draw(st.integers(0, len(mine)))
        first = index == 0
        clusters.append(
            VirtualCluster(
                name=name,
                guaranteed_devices=draw(_maybe(st.integers(0, 2))) if form == "hosts" else None,
                guaranteed_cells=(
                    GuaranteedCells(cell_type="rack.node", cell_number=draw(st.just(2))),
                )
                if form == "cells" and draw(st.booleans()) and first
                else (),
                pinned_cells=("mine",) if form == "cells" and draw(st.booleans()) and first else (),
                weight=draw(_maybe(st.floats(0.001, 1000))),
                quotas=draw(quotas),
                each=draw(terms),
                users=tuple(draw(st.builds(User, name=st.just(n), **_terms)) for n in mine[:cut]),
                groups=(draw(st.builds(UserGroup, name=names, members=st.just(tuple(mine[cut:])))),)
                if mine[cut:]
                else (),
            )
        )
    admitted = draw(_maybe(st.booleans()))
    others = {} if admitted is False else _terms
    home = None if admitted is False else draw(st.sampled_from([None, "default", *cluster_names]))
    return Policy(
        cluster={
            "none": None,
            "hosts": ClusterPolicy(hosts=draw(_maybe(st.integers(2, 4))), devices_per_host=6),
            "cells": _RACK,
        }[form],
        tiers=Tiers(
            premium=draw(tier_terms()),
            standard=draw(tier_terms()),
            basic=TierTerms(gpu_percent=draw(_maybe(st.just(12.5)))),
        ),
        jobs=JobTerms(grow_after=draw(_maybe(durations | st.sampled_from((0, math.inf))))),
        defaults=draw(terms),
        others=draw(
            st.builds(Others, admitted=st.just(admitted), virtual_cluster=st.just(home), **others)
        ),
        virtual_clusters=tuple(clusters),
    )
