"""The grammar of policy documents: every key, its values, and one sentence about its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jupyter_sing.scheduler.policy import model
from jupyter_sing.scheduler.policy.grammar import (
    Choice,
    Field,
    Flag,
    Kind,
    ListOf,
    Named,
    NameOrRecord,
    Number,
    OrWithout,
    Quantity,
    Record,
    Schema,
    Text,
)
from jupyter_sing.scheduler.settings import Tier
from kernelproxy.common.units import DURATION_UNITS, SIZE_UNITS

DEVICES_MAX = 10_000

_NAME = Text("^[A-Za-z0-9][A-Za-z0-9_-]{0,59}$", "a name of at most 60 letters, digits, - and _")
# Name that a hub or an operating system gives a user, or a pattern of such names.
_USER = Text(r"^\S(.{0,126}\S)?$", "the name of a user, or a pattern such as s-*", numbers=True)
_TYPE_PATH = Text("^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$", "names of cell types, joined by dots")
_ADDRESS = Text(r"^\S(.{0,126}\S)?$", "an address", numbers=True)

_DURATION = Quantity(DURATION_UNITS, "10 min")
_SIZE = Quantity(SIZE_UNITS, "24 GiB", zero=True)
_WEIGHT = Number(0.001, 1000)
_COUNT = Number(1, DEVICES_MAX, whole=True)

_QUOTAS = Record(
    "quotas",
    model.Quotas,
    {
        "devices": Field(
            OrWithout(Number(0, DEVICES_MAX, whole=True), "unlimited"),
            "Devices held at once. Built in: unlimited.",
        ),
        "device_memory": Field(
            OrWithout(_SIZE, "unlimited"),
            "Memory on devices, of all sessions together. Built in: unlimited.",
        ),
        "gpu_hours_per_day": Field(
            OrWithout(Number(0, 24 * DEVICES_MAX), "unlimited"),
            "Hours of device time in any 24 hours. Built in: unlimited.",
        ),
        "disk": Field(
            OrWithout(_SIZE, "unlimited"),
            "Disk for suspended sessions and checkpoints. Built in: unlimited.",
        ),
    },
)

_TERMS = {
    "tier": Field(
        Choice(Tier), "What is promised: premium, standard or basic. Built in: standard."
    ),
    "weight": Field(_WEIGHT, "Share among the users of a virtual cluster. Built in: 1."),
    "packing": Field(
        Flag(),
        "Whether other sessions may execute on a device together with theirs, while both get on "
        "faster so than by turns. Built in: false.",
    ),
    "quotas": Field(_QUOTAS, "What each user may have, with all their sessions."),
}

_USER_ENTRY = Record(
    "user",
    model.User,
    {"name": Field(_USER, "A user, or a pattern with *, ? or [0-9].", required=True), **_TERMS},
)

_GROUP = Record(
    "group",
    model.UserGroup,
    {
        "members": Field(
            ListOf(_USER, minimum=1), "Users, or patterns with *, ? or [0-9].", required=True
        ),
        **_TERMS,
    },
)

_VIRTUAL_CLUSTER = Record(
    "virtual_cluster",
    model.VirtualCluster,
    {
        "guaranteed_devices": Field(
            Number(0, DEVICES_MAX, whole=True),
            "Devices that its users can always have, in a cluster of equal hosts. Built in: 0.",
        ),
        "guaranteed_cells": Field(
            ListOf(
                Record(
                    "cells",
                    model.GuaranteedCells,
                    {
                        "cell_type": Field(
                            _TYPE_PATH, "Path from a top cell's type down, such as RACK.NODE.", True
                        ),
                        "cell_number": Field(_COUNT, "How many. Built in: 1."),
                    },
                )
            ),
            "Cells that its users can always have, in a cluster that is described by cells.",
        ),
        "pinned_cells": Field(
            ListOf(_NAME), "Ids of the physical cells that nobody else is guaranteed."
        ),
        "weight": Field(
            _WEIGHT, "Share among virtual clusters of what nobody is guaranteed. Built in: 1."
        ),
        "quotas": Field(_QUOTAS, "What all its users may have together."),
        "each": Field(
            Record("each", model.UserTerms, _TERMS),
            "What each of its users gets, where neither their entry nor their group says it.",
        ),
        "users": Field(
            ListOf(NameOrRecord(_USER, _USER_ENTRY)), "Who is in it: names, or entries with a name."
        ),
        "groups": Field(Named(_NAME, _GROUP), "Users with the same terms, by name of the group."),
    },
)

_TIER = Record(
    "tier",
    model.TierTerms,
    {
        "gpu_percent": Field(
            Number(0, 99),
            "Device time that a session gets, of what it asks for, over a sliding hour; 0: no "
            "promise. Built in: 95, 70 and 0.",
        ),
        "suspend_after": Field(
            OrWithout(_DURATION, "never"),
            "Time without use after which a session's device memory is freed. Built in: 10 min.",
        ),
        "hibernate_after": Field(
            OrWithout(_DURATION, "never"),
            "Time without use after which the notebook's process is put on disk, too. Built in: "
            "never.",
        ),
        "max_hold": Field(
            OrWithout(_DURATION, "unlimited"),
            "Time on a device after which a running cell gives way to whoever waits; it is "
            "suspended, not ended. Built in: unlimited.",
        ),
    },
)

_CHILD_FIELDS: dict[str, Field] = {
    "cell_address": Field(_ADDRESS, "Name of a host, or index of a cell within one."),
    "pinned_cell_id": Field(_NAME, "By which a virtual cluster can pin it."),
}
_CHILD = Record("child_cell", model.ChildCell, _CHILD_FIELDS)
_CHILD_FIELDS["cell_children"] = Field(
    ListOf(_CHILD), "Its cells, in order, where one of them has an address or an id."
)

_CLUSTER = Record(
    "cluster",
    model.ClusterPolicy,
    {
        "hosts": Field(_COUNT, "Hosts with equal devices. Built in: 1."),
        "devices_per_host": Field(_COUNT, "Devices of each host."),
        "cell_types": Field(
            Named(
                _NAME,
                Record(
                    "cell_type",
                    model.CellType,
                    {
                        "child_cell_type": Field(
                            _NAME, "Type of its cells; one that is not defined is a device.", True
                        ),
                        "child_cell_number": Field(_COUNT, "How many of them it has.", True),
                        "is_node_level": Field(
                            Flag(), "Whether such a cell is a host. Built in: false."
                        ),
                    },
                ),
            ),
            "Of what cells consist, by type.",
        ),
        "physical_cells": Field(
            ListOf(
                Record(
                    "physical_cell",
                    model.TopCell,
                    {"cell_type": Field(_NAME, "One of cell_types.", True), **_CHILD_FIELDS},
                )
            ),
            "The cells that there are and that are in no other.",
        ),
    },
)

POLICY = Record(
    "policy",
    model.Policy,
    {
        "cluster": Field(_CLUSTER, "What there is. Without it: what the machine has."),
        "tiers": Field(
            Record(
                "tiers",
                model.Tiers,
                {
                    tier.value: Field(_TIER, f"What {tier.value} sessions are promised.")
                    for tier in Tier
                },
            ),
            "What the three tiers mean.",
        ),
        "defaults": Field(
            Record("defaults", model.UserTerms, _TERMS),
            "What everybody gets, where nothing nearer to them says it.",
        ),
        "others": Field(
            Record(
                "others",
                model.Others,
                {
                    "admitted": Field(
                        Flag(), "Whether they may use devices at all. Built in: true."
                    ),
                    "virtual_cluster": Field(
                        _NAME,
                        "Where they are. Built in: default, which is there with no guarantee if it "
                        "is not described.",
                    ),
                    **_TERMS,
                },
            ),
            "Those whom no virtual cluster names.",
        ),
        "virtual_clusters": Field(
            Named(_NAME, _VIRTUAL_CLUSTER), "Users who share a guarantee, by name."
        ),
    },
)

KINDS: Mapping[str, Kind[Any]] = MappingProxyType(
    {
        key: field.kind
        for fields in (_TERMS, _QUOTAS.fields, _TIER.fields)
        for key, field in fields.items()
    }
)
"""Of the keys of terms, quotas and tiers; none of these names has another kind elsewhere."""


def schema() -> Schema:
    """Describe the grammar as JSON Schema (draft 7)."""
    definitions: Schema = {}
    POLICY.schema(definitions)
    described = definitions.pop(POLICY.name)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Policy of jupyter_sing",
        "description": "Who may use which devices; see docs/policy.md.",
        **described,
        "definitions": dict(sorted(definitions.items())),
    }
