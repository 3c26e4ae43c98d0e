"""Policy documents: validation by pydantic, errors in one line with its number, JSON Schema."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from jupyter_sing.scheduler.policy.errors import PolicyError, joined, quoted
from jupyter_sing.scheduler.policy.model import PolicyDocument
from jupyter_sing.scheduler.policy.values import WrittenFloat, WrittenInt
from jupyter_sing.scheduler.policy.yaml_reader import Items, Keys, Node, Scalar

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

COMPARED_CHARACTERS_MAX = 60  # comparing names takes the square of their length


@cache
def _adapter() -> TypeAdapter[PolicyDocument]:
    from pydantic import TypeAdapter

    return TypeAdapter(PolicyDocument)


def validated(root: Node) -> PolicyDocument:
    """Make typed values of a tree.

    Raises
    ------
    PolicyError
        If it is no policy: the error that comes first in the text.
    """
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(_plain(root))
    except ValidationError as error:
        found = [_refusal(each, root) for each in error.errors(include_url=False)]
        raise min(found, key=lambda each: each.line or 0) from None


def written(document: PolicyDocument) -> dict[str, Any]:
    """Convert a document to JSON values; `validated` reads the same document again."""
    found: dict[str, Any] = _adapter().dump_python(document, mode="json")
    return found


def schema() -> dict[str, Any]:
    """Describe documents as JSON Schema (draft 7, which editors support best)."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        """Leaves out titles and defaults, which repeat names and descriptions."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def default_schema(self, schema: Any) -> dict[str, Any]:
            return self.generate_inner(schema["schema"])

    template = "#/definitions/{model}"
    found = _adapter().json_schema(ref_template=template, schema_generator=Generator)
    definitions = found.pop("$defs")
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Policy of jupyter_sing"}
    return {**head, **_draft_7({**found, "definitions": definitions})}


def _draft_7(schema: Any) -> Any:
    """Put references that have a description into ``allOf``: draft 7 ignores all beside them."""
    if isinstance(schema, list):
        return [_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _draft_7(each) for key, each in schema.items() if key != "title"}
    if "$ref" in found and len(found) > 1:
        found["allOf"] = [{"$ref": found.pop("$ref")}]
    return found


def _plain(node: Node) -> object:
    """Convert a tree to plain values; numbers keep their text, since names may be numbers."""
    if isinstance(node, Keys):
        return {key: _plain(each) for key, each in node.items.items()}
    if isinstance(node, Items):
        return [_plain(each) for each in node.items]
    value: object = node.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = WrittenInt(value) if isinstance(value, int) else WrittenFloat(value)
        number.text = node.text
        return number
    return value


def _refusal(error: ErrorDetails, root: Node) -> PolicyError:
    """Describe an error of pydantic in one line, with the line of the text."""
    node, path, line, context = root, "", root.line, error.get("ctx", {})
    is_name = error["loc"][-1:] == ("[key]",)
    for key in error["loc"][:-1] if is_name else error["loc"]:
        if isinstance(node, Keys) and key in node.items:
            path, line, node = joined(path, str(key)), node.lines[str(key)], node.items[str(key)]
        elif isinstance(node, Items):
            path, node = f"{path}[{key}]", node.items[int(key)]
            line = node.line
    match error["type"]:
        case "unknown" if isinstance(node, Keys):
            key, known = context["key"], context["known"]
            near = difflib.get_close_matches(key[:COMPARED_CHARACTERS_MAX], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
            return PolicyError(joined(path, key), f"is no key here; {hint}", node.lines[key])
        case "absent":
            return PolicyError(joined(path, context["key"]), "is missing", node.line)
        case "too_short":
            lacking = f"must have {context['min_length']} items or more, not 0"
            return PolicyError(path, lacking, node.line)
        case "allowed" if is_name:
            return PolicyError(path, f"must have for a name {context['allowed']}", line)
    allowed = context.get("allowed", "a list")
    if error["type"] == "dict_type":
        allowed = "names and what they have"
    if isinstance(node, Scalar) and not isinstance(node.value, str | None):
        if "pattern" in context and re.search(context["pattern"], node.text):
            problem = f"must be {allowed}: write {quoted(node.text)} in quotes"
            return PolicyError(path, problem, node.line)
        if "positive" in context and not isinstance(node.value, bool) and node.value <= 0:
            allowed = f"{context['positive']}{context['also']}"
    return PolicyError(path, f"must be {allowed}, not {_described(node)}", node.line)


def _described(node: Node) -> str:
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, Keys):
        return "keys"
    if node.value is None:
        return "empty"
    return quoted(node.text) if isinstance(node.value, str) else quoted(node.text)[1:-1]
