"""The JSON Schema of policies agrees with the parser."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hatchling.builders.wheel import WheelBuilder
from hypothesis import given, settings

from jupyter_sing import scheduler
from jupyter_sing.scheduler.policy import Policy, PolicyError, document, parse
from jupyter_sing.scheduler.policy.document import schema, validated
from jupyter_sing.scheduler.policy.yaml_reader import read
from tests.scheduler.policy_strategies import EXAMPLES, STEADY, policies

FILE = Path(scheduler.__file__).parent / "policy.schema.json"
VALIDATOR = jsonschema.Draft7Validator(schema())


def test_the_file_is_the_grammar() -> None:
    written = json.dumps(schema(), indent=1) + "\n"
    assert FILE.read_text("utf-8") == written, (
        "it is to be what json.dumps(schema(), indent=1) gives, and a newline"
    )


def test_the_file_is_in_the_wheel() -> None:
    builder = WheelBuilder(str(FILE.parents[2]))
    paths = [each.distribution_path for each in builder.recurse_included_files()]
    assert "jupyter_sing/scheduler/policy.schema.json" in paths


def test_the_schema_is_valid_and_describes_every_key() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    for record in (schema(), *schema()["definitions"].values()):
        assert all(each["description"].endswith(".") for each in record["properties"].values())


def reader_accepts(value: Any) -> bool:
    try:
        validated(read(json.dumps(value)))
    except PolicyError:
        return False
    return True


@settings(STEADY, max_examples=30)
@given(policies())
def test_policies_are_valid_by_the_schema(policy: Policy) -> None:
    assert VALIDATOR.is_valid(document(policy))


OTHER_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2.0, 2.5, 0.001, 1000, 1001, 10_001, 99, 99.5, 10**400, "", " ",
    "x", "no", "7", "premium", "never", "unlimited", "10 min", "10 GiB", "0 GiB", "0 min", "1.5 h",
    "999999 d", "1000000 d", "a.b", "s-*", "x" * 61, "x" * 129, [], [1], ["a"], {}, {"name": "a"},
    {"members": []}, {"members": [1]}, {"a": {}}, {"a b": {}}, {"cell_type": "a"},
)  # fmt: skip
KEYS = ("name", "tier", "weight", "users", "each", "quotas", "cell_children", "x", "devices")


def places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a document."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop()
        below = list(each.items() if isinstance(each, dict) else enumerate(each))
        found += [(each, key) for key, _ in below]
        waiting += [value for _, value in below if isinstance(value, dict | list)]
    return found


def change(value: Any, chance: random.Random) -> None:
    container, key = chance.choice(places(value))
    action = chance.randrange(4)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[chance.choice(KEYS)] = copy.deepcopy(container[key])
    else:
        container[key] = copy.deepcopy(chance.choice(OTHER_VALUES))


@pytest.mark.parametrize("example", EXAMPLES)
def test_both_refuse_the_same_documents(example: str) -> None:
    whole = document(parse(EXAMPLES[example]))
    chance = random.Random(example)
    outcomes = []
    for _ in range(120):
        changed = copy.deepcopy(whole)
        change(changed, chance)
        outcomes.append(VALIDATOR.is_valid(changed))
        assert reader_accepts(changed) == outcomes[-1], json.dumps(changed)
    assert set(outcomes) == {True, False}
