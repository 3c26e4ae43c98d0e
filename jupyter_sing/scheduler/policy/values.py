"""Types of the values in a policy document, as annotations for pydantic.

Each says what is allowed, in words, and can write what it reads. pydantic is imported only when a
document is read, written or described: a daemon without a policy starts without it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler as Core
    from pydantic import GetJsonSchemaHandler as Json
    from pydantic_core import CoreSchema as Schema


@dataclasses.dataclass(frozen=True)
class Value:
    """Type of a single value.

    Attributes
    ----------
    allowed
        User-facing text: what is allowed.
    core
        Creates the schema, as a dictionary of `pydantic_core.core_schema`.
    convert
        Makes the value of one that the schema has accepted.
    write
        Converts the value to JSON, such that reading returns the same value.
    before
        Changes a value before the schema.
    context
        What the text of an error may need, besides `allowed`.
    json
        Keywords of the JSON Schema that replace pydantic's.
    """

    allowed: str
    core: dict[str, Any]
    convert: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], object] = lambda value: value
    before: Callable[[object], object] = lambda value: value
    context: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    json: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def or_word(self, word: str) -> Value:
        """Return the type that also accepts a word for infinity: there is no limit."""
        infinite = {
            "type": "function-after",
            "function": {"type": "no-info", "function": lambda _: math.inf},
            "schema": {"type": "literal", "expected": [word]},
        }
        also = f", or {word}"
        return Value(
            self.allowed + also,
            {"type": "union", "choices": [self.schema(), infinite]},
            write=lambda value: word if value == math.inf else self.write(value),
            context={**self.context, "also": also},
        )

    def schema(self) -> dict[str, Any]:
        """Return the schema of pydantic, with its own errors."""
        inner = {"type": "function-before", "schema": self.core}
        inner["function"] = {"type": "no-info", "function": self.before}
        function = {"type": "no-info", "function": self.convert}
        return {"type": "function-after", "schema": inner, "function": function}

    def __get_pydantic_core_schema__(self, source: object, handler: Core) -> Schema:
        from pydantic_core import core_schema

        return core_schema.custom_error_schema(
            self.schema(),
            custom_error_type="allowed",
            custom_error_message="{allowed}",
            custom_error_context={**self.context, "allowed": self.allowed},
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.write, when_used="unless-none"
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Schema, handler: Json) -> dict[str, Any]:
        return {**handler(schema), **self.json}


FLAG = Value("true or false", {"type": "bool", "strict": True})


def choice(words: type[StrEnum]) -> Value:
    """Return the type of the words of an enumeration."""
    *most, last = words
    core = {"type": "literal", "expected": [str(word) for word in words]}
    return Value(f"{', '.join(most)} or {last}", core, convert=words, write=str)


def text(pattern: str, allowed: str, *, numbers: bool = False) -> Value:
    """Return the type of a name.

    Parameters
    ----------
    pattern
        Regular expression for all of it, in what Python and JavaScript have in common.
    allowed
        User-facing text.
    numbers
        True if it may be a number without quotes, as a student number may be.
    """
    core = {"type": "str", "pattern": pattern, "strict": True, "regex_engine": "python-re"}
    context = {"pattern": pattern}
    if not numbers:
        return Value(allowed, core, context=context)
    kinds = {"type": ["string", "number"]}
    return Value(allowed, core, before=_as_written, context=context, json=kinds)


def number(minimum: float, maximum: float) -> Value:
    """Return the type of a number within limits, both of them allowed."""
    core = {"type": "float", "ge": minimum, "le": maximum, "strict": True}
    return _number("a number", minimum, maximum, core)


def whole(minimum: int, maximum: int) -> Value:
    """Return the type of a whole number within limits, both of them allowed."""
    core = {"type": "int", "ge": minimum, "le": maximum, "strict": True}
    return dataclasses.replace(_number("a whole number", minimum, maximum, core), before=_whole)


def _number(kind: str, minimum: float, maximum: float, core: dict[str, Any]) -> Value:
    positive = {"positive": f"above 0 ({minimum:g} to {maximum:g})"} if minimum > 0 else {}
    allowed = f"{kind} from {minimum:g} to {maximum:g}"
    return Value(allowed, core, write=_shortest, context={"also": "", **positive})


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shortest(value: float) -> float:
    return int(value) if value == int(value) else value


def quantity(units: Mapping[str, int], example: str, *, zero: bool = False) -> Value:
    """Return the type of a whole number with a unit, read as a number of the smallest unit."""
    digits = "(0|[1-9][0-9]{0,5})" if zero else "([1-9][0-9]{0,5})"
    pattern = f"^{digits} ?({'|'.join(units)})$"

    def convert(text: str) -> int:
        count, unit = re.findall("[0-9]+|[A-Za-z]+", text)
        return int(count) * units[unit]

    def write(value: float) -> str:
        whole = (each for each in units if value % units[each] == 0)
        unit = max(whole, key=units.__getitem__) if value else min(units, key=units.__getitem__)
        return f"{int(value) // units[unit]} {unit}"

    allowed = f"a whole number with a unit ({', '.join(units)}), such as {example}"
    return Value(allowed, {"type": "str", "pattern": pattern, "strict": True}, convert, write)


class WrittenInt(int):
    """A whole number with its text in the document."""

    text: str


class WrittenFloat(float):
    """A number with its text in the document."""

    text: str


def _as_written(value: object) -> object:
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else value


class DocumentRecord:
    """Base of dataclasses that are keys of a document, and nothing else."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Core) -> Schema:
        from pydantic_core import core_schema

        found = handler(source)
        record: Any = handler.resolve_ref_schema(found)  # all uses of the class refer to this one
        record["schema"] = core_schema.no_info_before_validator_function(
            cls._check, record["schema"]
        )
        record["serialization"] = core_schema.wrap_serializer_function_ser_schema(_without_empty)
        return found

    @classmethod
    def _check(cls, value: object) -> object:
        """Refuse keys that there are not, and missing ones, before any value is read."""
        from pydantic_core import PydanticCustomError

        fields = _fields(cls)
        if not isinstance(value, dict):
            known = {"allowed": f"keys ({', '.join(fields)})"}
            raise PydanticCustomError("allowed", "{allowed}", known)
        for key in value:
            if key not in fields:
                raise PydanticCustomError("unknown", "{key}", {"key": key, "known": list(fields)})
        for key, field in fields.items():
            if key not in value and field.default is dataclasses.MISSING:
                raise PydanticCustomError("absent", "{key}", {"key": key})
        return value


def _without_empty(value: object, write: Callable[[object], Any]) -> object:
    """Write a record without the keys that say nothing."""
    if value is None:
        return None
    found = write(value)
    keys = [key for key in _fields(type(value)) if key in found]
    return {key: found[key] for key in keys if found[key] not in (None, {}, [])}


def _fields(record: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a record, its own before those of its base."""
    found = {field.name: field for field in dataclasses.fields(record)}
    names = (key for kind in record.__mro__ for key in inspect.get_annotations(kind))
    return {key: found[key] for key in names if key in found}


@dataclasses.dataclass(frozen=True)
class ByName:
    """Records by names that the writer chooses: read as a tuple of records with a `name`.

    Attributes
    ----------
    key
        The names.
    entry
        DocumentRecord of the document, without the name; the items of the tuple are of a subclass.
    """

    key: Value
    entry: type[DocumentRecord]

    def __get_pydantic_core_schema__(self, source: Any, handler: Core) -> Schema:
        from pydantic_core import core_schema

        def named(found: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(extended(source.__args__[0], v, name=k) for k, v in found.items())

        key = self.key.__get_pydantic_core_schema__(str, handler)
        names = core_schema.dict_schema(key, handler.generate_schema(self.entry))
        writing = core_schema.wrap_serializer_function_ser_schema(
            lambda value, write: write({each.name: each for each in value}), schema=names
        )
        return core_schema.no_info_after_validator_function(named, names, serialization=writing)

    def __get_pydantic_json_schema__(self, schema: Schema, handler: Json) -> dict[str, Any]:
        return {**handler(schema), "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class OrName:
    """A record with a `name` among its keys, or, where that is all, the name."""

    name: Value

    def __get_pydantic_core_schema__(self, source: Any, handler: Core) -> Schema:
        from pydantic_core import core_schema

        def read(value: object) -> object:
            return value if isinstance(value, dict | list) else {"name": value}

        def write(value: object, write: Callable[[object], dict[str, Any]]) -> object:
            found = write(value)
            return found["name"] if list(found) == ["name"] else found

        writing = core_schema.wrap_serializer_function_ser_schema(write)
        return core_schema.no_info_before_validator_function(
            read, handler(source), serialization=writing
        )

    def __get_pydantic_json_schema__(self, schema: Schema, handler: Json) -> dict[str, Any]:
        name = {"type": "string", "pattern": self.name.context["pattern"], **self.name.json}
        return {"anyOf": [name, handler(schema)]}


@dataclasses.dataclass(frozen=True)
class Present:
    """A record that may be left out, but is not empty where it is written."""

    record: type[DocumentRecord]

    def __get_pydantic_core_schema__(self, source: object, handler: Core) -> Schema:
        return handler.generate_schema(self.record)


class NotEmpty:
    """Marks a list that has an item."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Core) -> Schema:
        return {**handler(source), "min_length": 1}


def key(description: str, default: Any = None, *, label: str = "") -> Any:
    """Return a field of a record that may be left out.

    Editors show its description; `label` is its name in tables and sentences.
    """
    metadata = {"description": description, "label": label}
    return dataclasses.field(default=default, metadata=metadata)


def required(description: str) -> Any:
    """Return a field of a record that must be there."""
    return dataclasses.field(metadata={"description": description})


def extended(kind: type, record: DocumentRecord, **more: Any) -> Any:
    """Return a record as an instance of a subclass with more attributes."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    return kind(**{field.name: getattr(record, field.name) for field in fields}, **more)
