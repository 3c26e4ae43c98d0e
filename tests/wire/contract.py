"""The product's interfaces as data: each function returns one of them, as a JSON value.

`recorded/NAME.json` holds what `CONTRACT[NAME]` returned when it was last recorded. Modules and
classes may be renamed freely; then only the imports here change.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from jupyter_sing.cli import commands as cli
from jupyter_sing.notebook import magics
from kernelproxy.agent.supervisor import fdstore
from kernelproxy.common import shared_memory as oplog
from kernelproxy.common.protocol import Message, snapshot_tables
from kernelproxy.kernel.namespace import rebuild
from kernelproxy.storage import manifest

ROOT = Path(__file__).parents[2]
OPLOG = ROOT / "native" / "oplog"


def messages() -> dict[str, Any]:
    """Messages between processes: kind, longest frame, and each field with its type and default."""
    return {
        each.wire_kind: {
            "frame_bytes_max": each.frame_bytes_max,
            "fields": {name: _field(each, name) for name in typing.get_type_hints(each)},
        }
        for each in Message.__subclasses__()
    }


def _field(message: Any, name: str) -> str:
    (field,) = (each for each in dataclasses.fields(message) if each.name == name)
    # A message does not name the type of an object: test_views.py compares its fields.
    wire_type = re.sub(r"\b[A-Z]\w*View\b", "dict[str, Any]", str(field.type))
    wire_type = re.sub(r"\bReason\b", "str", wire_type)
    if field.default is not dataclasses.MISSING:
        return f"{wire_type} = {field.default!r}"
    return f"{wire_type}{'' if field.default_factory is dataclasses.MISSING else ' = computed'}"


def shared_memory() -> dict[str, Any]:
    """Pages and records of the device log: constants, and declarations without comments."""
    headers = [(OPLOG / name).read_text() for name in ("layout.h", "codec.h", "geometry.h")]
    source = re.sub(r"//[^\n]*", "", "\n".join(headers))
    enums = re.findall(r"enum class (\w+) : (\w+) \{(.*?)\};", source, re.DOTALL)
    structs = re.findall(r"\nstruct (\w+) \{(.*?)\n\};", source, re.DOTALL)
    plain = {name: body for name, body in structs if "(" not in re.sub(r"alignas\(\w+\)", "", body)}
    return {
        "magic": oplog.MAGIC,
        "version": oplog.LAYOUT_VERSION,
        "page bytes": oplog.PAGE_BYTES,
        "answer ring bytes": oplog.ANSWER_RING_BYTES,
        "enums": {name: [kind, *_listed(body, ",")] for name, kind, body in enums},
        "structs": {name: _listed(body, ";") for name, body in plain.items()},
    }


def _listed(body: str, end: str) -> list[str]:
    return [" ".join(each.split()) for each in body.split(end) if each.strip()]


def on_disk() -> dict[str, Any]:
    """Versions and layouts of snapshots, manifests and deposited sessions."""
    label = manifest.Label("owner", "name", "kind", "torch", "device", 1, {})
    empty = manifest.Manifest(label, 0.0, 1, {}, {}, (), ())
    return {
        "snapshot": [
            snapshot_tables.MAGIC,
            snapshot_tables.VERSION,
            snapshot_tables.HEADER.format,
            snapshot_tables.ENTRY.format,
        ],
        "manifest format": manifest.FORMAT_VERSION,
        "manifest": manifest.encode(empty).decode().splitlines()[0],
        "deposit": fdstore.RECORD_VERSION,
    }


def rebuilding() -> dict[str, Any]:
    """Functions that streams of checkpoints name, with their parameters."""
    # The module's path is in the streams, so it is written out.
    assert rebuild.__name__ == "kernelproxy.kernel.namespace.rebuild"
    return {
        name: str(inspect.signature(function))
        for name, function in vars(rebuild).items()
        if inspect.isfunction(function) and function.__module__ == rebuild.__name__
        if not name.startswith("_") and not hasattr(function, "__wrapped__")
    }


def rest() -> dict[str, Any]:
    """REST resources: the document that the tests of the server check."""
    return _without_prose(yaml.safe_load((ROOT / "jupyter_sing/server/openapi.yaml").read_text()))


def events() -> dict[str, Any]:
    """The schema of what the server emits."""
    return _without_prose(
        yaml.safe_load((ROOT / "jupyter_sing/server/events/session-v1.yaml").read_text())
    )


def _without_prose(document: Any) -> Any:
    if isinstance(document, list):
        return [_without_prose(each) for each in document]
    if not isinstance(document, dict):
        return document
    return {
        str(key): _without_prose(value)
        for key, value in document.items()
        # A property may be called like a piece of prose.
        if not (key in ("description", "summary", "example") and isinstance(value, str))
    }


def commands() -> dict[str, Any]:
    """``jupyter sing``: each verb with its arguments."""
    return dict(_verbs(cli.parser()))


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                below = dict(_verbs(verb))
                yield name, below or sorted(_argument(each) for each in verb._actions)


def _argument(action: argparse.Action) -> str:
    """An argument in the notation of a usage line."""
    choices = f" of {'|'.join(map(str, action.choices))}" if action.choices else ""
    takes = "" if action.nargs is None else f" x {action.nargs}"
    named = "/".join(action.option_strings) or action.dest
    kind = type(action).__name__.strip("_").removesuffix("Action").lower()
    default = "" if callable(action.default) else f", default {_portable(action.default)}"
    return f"{named}: {kind}{takes}{choices}{default}{', required' if action.required else ''}"


def _portable(value: Any) -> str:
    """Return a default without paths of this machine."""
    return "a path" if isinstance(value, str) and "/" in value else repr(value)


def magic() -> dict[str, Any]:
    """``%sing``: each verb with its parameters."""
    return {name: str(inspect.signature(verb)) for name, verb in magics._VERBS.items()}


def environment() -> list[str]:
    """Environment variables: string literals with the name of one, or with text about a user's."""
    found = set(re.findall(r"JUPYTER_SING_[A-Z_]*[A-Z]", (ROOT / "docs/settings.md").read_text()))
    for package in ("jupyter_sing", "kernelproxy"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= set(re.findall(r"^SING_\w+$|JUPYTER_SING_[A-Z_]*[A-Z]", node.value))
    for path in (ROOT / "native").rglob("*.cpp"):
        found |= set(re.findall(r'getenv\("((?:JUPYTER_)?SING_\w+)"\)', path.read_text()))
    return sorted(found)


def entry_points() -> dict[str, Any]:
    """What the installed package registers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"scripts": project["scripts"], **project["entry-points"]}


CONTRACT: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        messages, shared_memory, on_disk, rebuilding, rest, events, commands, magic, environment,
        entry_points,
    )
}  # fmt: skip
