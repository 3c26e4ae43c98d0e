"""The kinds of values that a document may have: each reads, writes and describes itself.

A document's grammar is an object made of these. `read` makes typed values of a tree and refuses
everything else with one line; `write` is its inverse, into JSON values; `schema` is the same
grammar as JSON Schema (draft 7, which editors support best).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from jupyter_sing.scheduler.policy.errors import PolicyError, joined, quoted
from jupyter_sing.scheduler.policy.yaml_reader import Items, Keys, Node, Scalar

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
Schema = dict[str, Any]

COMPARED_CHARACTERS_MAX = 60  # comparing names takes the square of their length


class Kind(Protocol[T]):
    """One kind of values."""

    def read(self, node: Node, path: str) -> T:
        """Convert the node at a path to a value.

        Raises
        ------
        PolicyError
            If it is of another kind.
        """
        ...

    def write(self, value: T) -> object:
        """Convert a value to JSON, such that `read` returns the same value."""
        ...

    def schema(self, definitions: Schema) -> Schema:
        """Describe the kind; definitions with a name of their own go into `definitions`."""
        ...


def _refused(node: Node, path: str, allowed: str) -> PolicyError:
    return PolicyError(path, f"must be {allowed}, not {_described(node)}", node.line)


def _described(node: Node) -> str:
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, Keys):
        return "keys"
    if node.value is None:
        return "empty"
    return quoted(node.text) if isinstance(node.value, str) else quoted(node.text)[1:-1]


@dataclass(frozen=True)
class Text:
    """A name.

    Parameters
    ----------
    pattern : str
        Regular expression for all of it, in what Python and JavaScript have in common.
    allowed : str
        User-facing text: what is allowed.
    numbers : bool
        True if it may be a number without quotes, as a student number may be.
    """

    pattern: str
    allowed: str
    numbers: bool = False

    def read(self, node: Node, path: str) -> str:
        if not isinstance(node, Scalar) or node.value is None:
            raise _refused(node, path, self.allowed)
        if re.search(self.pattern, node.text) is None:
            raise _refused(node, path, self.allowed)
        allowed = (str, int, float) if self.numbers else str
        if isinstance(node.value, bool) or not isinstance(node.value, allowed):
            problem = f"must be {self.allowed}: write {quoted(node.text)} in quotes"
            raise PolicyError(path, problem, node.line)
        return node.text

    def write(self, value: str) -> object:
        return value

    def schema(self, definitions: Schema) -> Schema:
        kind = ["string", "number"] if self.numbers else "string"
        return {"type": kind, "pattern": self.pattern}


@dataclass(frozen=True)
class Choice(Generic[E]):
    """One of a few words."""

    words: type[E]

    def read(self, node: Node, path: str) -> E:
        if isinstance(node, Scalar) and node.value in list(self.words):
            return self.words(node.text)
        *most, last = self.words
        raise _refused(node, path, f"{', '.join(most)} or {last}")

    def write(self, value: E) -> object:
        return str(value)

    def schema(self, definitions: Schema) -> Schema:
        return {"enum": [str(word) for word in self.words]}


@dataclass(frozen=True)
class Flag:
    """Yes or no."""

    def read(self, node: Node, path: str) -> bool:
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        raise _refused(node, path, "true or false")

    def write(self, value: bool) -> object:
        return value

    def schema(self, definitions: Schema) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Number:
    """A number within limits, both of them allowed; `whole` ones are ints.

    Parameters
    ----------
    minimum, maximum : float
    whole : bool
    """

    minimum: float
    maximum: float
    whole: bool = False

    def read(self, node: Node, path: str, also: str = "") -> float:
        value = node.value if isinstance(node, Scalar) else None
        kind = "whole number" if self.whole else "number"
        allowed = f"a {kind} from {self.minimum:g} to {self.maximum:g}{also}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(node, path, allowed)
        if value <= 0 < self.minimum:
            allowed = f"above 0 ({self.minimum:g} to {self.maximum:g}){also}"
        # Compared before it is converted: not every int is a float, and nan is in no range.
        if not self.minimum <= value <= self.maximum or (self.whole and value != int(value)):
            raise _refused(node, path, allowed)
        return int(value) if self.whole else float(value)

    def write(self, value: float) -> object:
        return int(value) if value == int(value) else value

    def schema(self, definitions: Schema) -> Schema:
        kind = "integer" if self.whole else "number"
        return {"type": kind, "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class Quantity:
    """A whole number with a unit, such as ``10 min``: read as a number of the smallest unit.

    Parameters
    ----------
    units : mapping of str to int
        Size of each unit, the smallest first.
    example : str
    zero : bool
        True if 0 is allowed.
    """

    units: Mapping[str, int]
    example: str
    zero: bool = False

    @property
    def pattern(self) -> str:
        number = "(0|[1-9][0-9]{0,5})" if self.zero else "([1-9][0-9]{0,5})"
        return f"^{number} ?({'|'.join(self.units)})$"

    def read(self, node: Node, path: str, also: str = "") -> int:
        found = None
        if isinstance(node, Scalar) and isinstance(node.value, str):
            found = re.search(self.pattern, node.value)
        if found is None:
            units = ", ".join(self.units)
            allowed = f"a whole number with a unit ({units}), such as {self.example}{also}"
            raise _refused(node, path, allowed)
        return int(found[1]) * self.units[found[2]]

    def write(self, value: float) -> object:
        unit, size = max(
            ((u, s) for u, s in self.units.items() if value % s == 0), key=lambda each: each[1]
        )
        return f"{int(value) // size} {unit}"

    def schema(self, definitions: Schema) -> Schema:
        return {"type": "string", "pattern": self.pattern}


@dataclass(frozen=True)
class OrWithout:
    """A number, or a word that means that there is no limit: read as infinity.

    Parameters
    ----------
    kind : Number or Quantity
    word : str
    """

    kind: Number | Quantity
    word: str

    def read(self, node: Node, path: str) -> float:
        if isinstance(node, Scalar) and node.value == self.word:
            return math.inf
        return self.kind.read(node, path, f", or {self.word}")

    def write(self, value: float) -> object:
        return self.word if value == math.inf else self.kind.write(value)

    def schema(self, definitions: Schema) -> Schema:
        return {"anyOf": [self.kind.schema(definitions), {"const": self.word}]}


@dataclass(frozen=True)
class ListOf(Generic[T]):
    """A list of values of one kind: read as a tuple."""

    kind: Kind[T]
    minimum: int = 0

    def read(self, node: Node, path: str) -> tuple[T, ...]:
        if not isinstance(node, Items):
            raise _refused(node, path, "a list")
        if len(node.items) < self.minimum:
            problem = f"must have {self.minimum} items or more, not {len(node.items)}"
            raise PolicyError(path, problem, node.line)
        return tuple(self.kind.read(each, f"{path}[{i}]") for i, each in enumerate(node.items))

    def write(self, value: Sequence[T]) -> object:
        return [self.kind.write(each) for each in value]

    def schema(self, definitions: Schema) -> Schema:
        found: Schema = {"type": "array", "items": self.kind.schema(definitions)}
        return {**found, "minItems": self.minimum} if self.minimum else found


@dataclass(frozen=True)
class Field:
    """A key of a `Record`.

    Parameters
    ----------
    kind : Kind
    text : str
        What it means: one sentence, which editors show.
    required : bool
    """

    kind: Kind[Any]
    text: str
    required: bool = False


@dataclass(frozen=True)
class Record(Generic[T]):
    """Keys with fixed names: read as an instance of a class that has attributes of those names.

    Parameters
    ----------
    name : str
        Of the definition in the schema.
    make : callable
        The class; keys that are not there are not given to it, and are None or empty by default.
    fields : mapping of str to Field
    """

    name: str
    make: Callable[..., T]
    fields: Mapping[str, Field]

    def read(self, node: Node, path: str) -> T:
        return self.make(**self.read_keys(node, path))

    def read_keys(self, node: Node, path: str) -> dict[str, Any]:
        """Read only the keys, for callers that add other attributes to the instance."""
        if not isinstance(node, Keys):
            raise _refused(node, path, f"keys ({', '.join(self.fields)})")
        for key in node.items:
            if key not in self.fields:
                raise self._unknown(key, path, node.lines[key])
        for key, each in self.fields.items():
            if each.required and key not in node.items:
                raise PolicyError(joined(path, key), "is missing", node.line)
        return {
            key: self.fields[key].kind.read(below, joined(path, key))
            for key, below in node.items.items()
        }

    def write(self, value: T) -> object:
        found = {}
        for key, each in self.fields.items():
            below = getattr(value, key)
            written = None if below is None else each.kind.write(below)
            if each.required or not (written is None or written in ({}, [])):
                found[key] = written
        return found

    def schema(self, definitions: Schema) -> Schema:
        if self.name not in definitions:
            definitions[self.name] = {}  # there now, since records may contain their own kind
            found: Schema = {
                "type": "object",
                "properties": {
                    key: self._described(each, definitions) for key, each in self.fields.items()
                },
                "additionalProperties": False,
            }
            required = [key for key, each in self.fields.items() if each.required]
            if required:
                found["required"] = required
            definitions[self.name] = found
        return {"$ref": f"#/definitions/{self.name}"}

    @staticmethod
    def _described(field: Field, definitions: Schema) -> Schema:
        found = field.kind.schema(definitions)
        if "$ref" in found:  # draft 7 ignores everything beside it
            found = {"allOf": [found]}
        return {"description": field.text, **found}

    def _unknown(self, key: str, path: str, line: int) -> PolicyError:
        near = difflib.get_close_matches(key[:COMPARED_CHARACTERS_MAX], self.fields, 1)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(self.fields)}"
        return PolicyError(joined(path, key), f"is no key here; {hint}", line)


@dataclass(frozen=True)
class Named(Generic[T]):
    """Keys with names that the writer chooses: read as a tuple of records with a `name`.

    Parameters
    ----------
    key : Text
    record : Record
        Of a class with an attribute `name`, which is none of the record's fields.
    """

    key: Text
    record: Record[T]

    def read(self, node: Node, path: str) -> tuple[T, ...]:
        if not isinstance(node, Keys):
            raise _refused(node, path, "names and what they have")
        found = []
        for name, below in node.items.items():
            here = joined(path, name)
            if re.search(self.key.pattern, name) is None:
                problem = f"must have for a name {self.key.allowed}"
                raise PolicyError(here, problem, node.lines[name])
            found.append(self.record.make(name=name, **self.record.read_keys(below, here)))
        return tuple(found)

    def write(self, value: Sequence[T]) -> object:
        return {getattr(each, "name"): self.record.write(each) for each in value}  # noqa: B009

    def schema(self, definitions: Schema) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": self.key.pattern},
            "additionalProperties": self.record.schema(definitions),
        }


@dataclass(frozen=True)
class NameOrRecord(Generic[T]):
    """A record with a `name` among its fields, or, where that is all, the name."""

    name: Text
    record: Record[T]

    def read(self, node: Node, path: str) -> T:
        if isinstance(node, Scalar):
            return self.record.make(name=self.name.read(node, path))
        return self.record.read(node, path)

    def write(self, value: T) -> object:
        found = self.record.write(value)
        return found["name"] if isinstance(found, dict) and list(found) == ["name"] else found

    def schema(self, definitions: Schema) -> Schema:
        return {"anyOf": [self.name.schema(definitions), self.record.schema(definitions)]}
