"""YAML text as a tree of plain values with their lines, in bounded time for any text.

Only what a policy needs of YAML is read: keys, lists and scalars. Anchors, aliases, tags and
several documents are refused, and so are repeated keys, of which YAML libraries silently keep the
last. The tree is made from the parser's events, so nothing grows beyond the limits below and
nothing recurses.

Scalars are resolved by the core schema of YAML 1.2: ``no`` and ``12:30`` are texts, not a boolean
and a number of seconds.

The YAML package is imported when text is read: programs without a policy run without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from jupyter_sing.scheduler.policy.errors import PolicyError, joined, quoted

if TYPE_CHECKING:
    import yaml

TEXT_BYTES_MAX = 128 << 10
VALUES_MAX = 10_000
DEPTH_MAX = 32
SCALAR_CHARACTERS_MAX = 1024

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_CONSTANTS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as it was written, and what it means; `line` counts from 1."""

    text: str
    value: str | int | float | bool | None
    line: int


@dataclass(slots=True)
class Items:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Keys:
    """Keys and their values, in the order of the text."""

    line: int
    items: dict[str, Node] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # of the keys


Node: TypeAlias = Scalar | Items | Keys


def read(text: str | bytes) -> Node:
    """Read YAML text.

    Raises
    ------
    PolicyError
        If it is too large or too deep, not UTF-8, not YAML, empty, or uses a refused feature.
    """
    import yaml

    if len(text) > TEXT_BYTES_MAX:
        raise PolicyError("", f"is too large; {TEXT_BYTES_MAX >> 10} KiB are allowed")
    decoded = (_decoded(text) if isinstance(text, bytes) else text).removeprefix("\ufeff")
    builder = _Builder()
    try:
        # The parser in Python, even if libyaml is installed: every machine refuses the same texts.
        for event in yaml.parse(decoded, Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = quoted(error.problem or error.context or "?")[1:-1]
        raise PolicyError("", f"is not YAML: {what}", mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = decoded.count("\n", 0, error.position) + 1
        raise PolicyError("", "has characters that are not allowed in YAML", line) from None
    except PolicyError:  # is a ValueError itself
        raise
    except (ValueError, OverflowError):  # of escapes that are no characters, and of directives
        raise PolicyError("", "is not YAML: it has an escape or a directive out of range") from None
    if builder.root is None:
        raise PolicyError("", "is empty; a policy that says nothing special is {}")
    return builder.root


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise PolicyError("", "is not UTF-8 text", line) from None


def lines(root: Node) -> dict[str, int]:
    """Return the line of every path of a document."""
    return {path: line for path, _, line in walk(root)}


def walk(root: Node) -> Iterator[tuple[str, Node, int]]:
    """Yield path, node and first line of everything in a document, in its order."""
    waiting: list[tuple[str, Node, int]] = [("", root, root.line)]
    while waiting:
        path, node, line = waiting.pop()
        yield path, node, line
        if isinstance(node, Keys):
            below = [(joined(path, k), n, node.lines[k]) for k, n in node.items.items()]
        elif isinstance(node, Items):
            below = [(f"{path}[{i}]", n, n.line) for i, n in enumerate(node.items)]
        else:
            below = []
        waiting += reversed(below)


class _Builder:
    """Builds the tree, one event after the other."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self._open: list[tuple[Items | Keys, str]] = []  # from the root to the current one; paths
        self._key: str | None = None  # the one whose value comes next
        self._count = 0

    def take(self, event: yaml.Event) -> None:
        import yaml

        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise PolicyError(self._here(), "is an alias (*); write it out", line)
        if isinstance(event, yaml.NodeEvent):
            self._refuse_unwanted(event, line)
        if isinstance(event, yaml.ScalarEvent):
            self._take_scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent):
            self._begin(Keys(line))
        elif isinstance(event, yaml.SequenceStartEvent):
            self._begin(Items(line))
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise PolicyError("", "has a second document (---); one is allowed", line)

    def _here(self) -> str:
        if not self._open:
            return ""
        container, path = self._open[-1]
        if isinstance(container, Items):
            return f"{path}[{len(container.items)}]"
        return path if self._key is None else joined(path, self._key)

    def _refuse_unwanted(self, event: yaml.NodeEvent, line: int) -> None:
        self._count += 1
        if self._count > VALUES_MAX:
            raise PolicyError("", f"is too large; {VALUES_MAX} values are allowed", line)
        if event.anchor is not None:
            raise PolicyError(self._here(), "has an anchor (&); anchors are not allowed", line)
        if getattr(event, "tag", None) is not None:
            raise PolicyError(self._here(), "has a tag (!); tags are not allowed", line)

    def _begin(self, container: Items | Keys) -> None:
        path = self._here()
        if len(self._open) >= DEPTH_MAX:
            raise PolicyError("", f"is too deep; {DEPTH_MAX} levels are allowed", container.line)
        self._add(container)
        self._open.append((container, path))

    def _take_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        text = event.value
        if len(text) > SCALAR_CHARACTERS_MAX:
            problem = f"is too long; {SCALAR_CHARACTERS_MAX} characters are allowed"
            raise PolicyError(self._here(), problem, line)
        if not text.isprintable():  # control characters, and those that change the order of text
            problem = f"must be one line of printable characters, not {quoted(text)}"
            raise PolicyError(self._here(), problem, line)
        container = self._open[-1][0] if self._open else None
        if isinstance(container, Keys) and self._key is None:
            if text in container.items:
                problem = f"is there twice; it is in line {container.lines[text]} already"
                raise PolicyError(joined(self._open[-1][1], text), problem, line)
            self._key = text
            container.lines[text] = line
            return
        self._add(Scalar(text, text if event.style else resolved(text), line))

    def _add(self, node: Node) -> None:
        if not self._open:
            self.root = node
            return
        container, path = self._open[-1]
        if isinstance(container, Items):
            container.items.append(node)
        elif self._key is None:
            raise PolicyError(path, "has a key that is no word", node.line)
        else:
            container.items[self._key] = node
            self._key = None


def resolved(text: str) -> str | int | float | bool | None:
    """Return the value of a scalar without quotes."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    return text
