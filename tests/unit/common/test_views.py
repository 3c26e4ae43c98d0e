"""Typed descriptions are the schemas of openapi.yaml: names, required fields, types and enums."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal, NotRequired, Required

import pytest
import yaml

from kernelproxy.agent.session.states import State
from kernelproxy.common.protocol import FORMS, views
from kernelproxy.common.scheduler_api import TIERS
from kernelproxy.common.shared_memory import DeviceKind

ROOT = Path(__file__).resolve().parents[3]
OPENAPI = yaml.safe_load((ROOT / "jupyter_sing/server/openapi.yaml").read_text("utf-8"))
SCHEMAS: dict[str, Any] = OPENAPI["components"]["schemas"]
RESTORED = OPENAPI["paths"]["/sessions/{id}/restore"]["post"]["responses"]["200"]

VIEWS: dict[str, tuple[Any, Any]] = {
    "Session": (views.SessionView, SCHEMAS["Session"]),
    "Device": (views.DeviceView, SCHEMAS["Device"]),
    "Checkpoint": (views.CheckpointOnServer, SCHEMAS["Checkpoint"]),
    "Omission": (views.OmissionView, SCHEMAS["Omission"]),
    "Difference": (views.DifferenceView, SCHEMAS["Difference"]),
    "Activity": (views.ActivityView, SCHEMAS["Activity"]),
    "Span": (views.SpanView, SCHEMAS["Span"]),
    "Event": (views.EventView, SCHEMAS["Event"]),
    "restored": (views.RestoreView, RESTORED["content"]["application/json"]["schema"]),
}
NAMES = {"string": str, "integer": int, "number": float, "boolean": bool}


def compare(hint: Any, schema: dict[str, Any], where: str) -> list[str]:
    """Return the places where a type and a schema differ."""
    if "$ref" in schema:
        return compare(hint, SCHEMAS[schema["$ref"].rpartition("/")[2]], where)
    for part in schema.get("allOf", []):
        schema = {**SCHEMAS[part["$ref"].rpartition("/")[2]], **schema}
    if typing.get_origin(hint) in (Required, NotRequired):
        (hint,) = typing.get_args(hint)
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    if optional != schema.get("nullable", False):
        return [f"{where}: null"]
    if optional:
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    if typing.is_typeddict(hint):
        return compare_fields(hint, schema, where)
    if schema["type"] == "array":
        if typing.get_origin(hint) is not list:
            return [f"{where}: no list"]
        return compare(typing.get_args(hint)[0], schema["items"], f"{where}[]")
    if schema["type"] == "object":
        (_, value) = typing.get_args(hint)
        return compare(value, schema["additionalProperties"], f"{where}.*")
    if typing.get_origin(hint) is Literal:
        same = set(typing.get_args(hint)) == set(schema["enum"])
        return [] if same else [f"{where}: enum"]
    return [] if hint is NAMES[schema["type"]] else [f"{where}: {hint} is not {schema['type']}"]


def compare_fields(hint: Any, schema: dict[str, Any], where: str) -> list[str]:
    fields = typing.get_type_hints(hint, include_extras=True)
    properties = schema["properties"]
    found = [f"{where}.{each}: only in one" for each in fields.keys() ^ properties.keys()]
    # Python does not see these marks in annotations that are strings.
    marked = {name: typing.get_origin(each) for name, each in fields.items()}
    required = {
        name
        for name, mark in marked.items()
        if mark is Required or (mark is not NotRequired and name in hint.__required_keys__)
    }
    if required != set(schema.get("required", [])):
        found.append(f"{where}: required")
    for name in fields.keys() & properties.keys():
        found += compare(fields[name], properties[name], f"{where}.{name}")
    return found


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_its_schema(name: str) -> None:
    view, schema = VIEWS[name]
    assert compare(view, schema, name) == []


def test_comparison_finds_differences() -> None:
    schema = {
        "type": "object", "required": ["at", "kind"],
        "properties": {"at": {"type": "integer"}, "kind": {"type": "string", "nullable": True}},
    }  # fmt: skip
    assert sorted(compare(views.EventView, schema, "e")) == [
        "e.at: <class 'float'> is not integer",
        "e.device: only in one", "e.kind: null", "e.name: only in one", "e.owner: only in one",
        "e.session: only in one", "e.text: only in one", "e: required",
    ]  # fmt: skip


def test_enums_are_those_of_the_code() -> None:
    session = SCHEMAS["Session"]["properties"]
    assert set(session["state"]["enum"]) == {str(each) for each in State}
    assert set(SCHEMAS["Level"]["enum"]) == set(session["served_as"]["enum"]) == set(TIERS)
    assert set(SCHEMAS["Form"]["enum"]) == {"", *FORMS}
    kinds = {each.name.lower() for each in DeviceKind}
    assert set(SCHEMAS["Device"]["properties"]["kind"]["enum"]) == kinds
