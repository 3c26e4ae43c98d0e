"""Interfaces agree with their recorded versions."""

from __future__ import annotations

import json

import pytest

from tests.wire.contract import CONTRACT
from tests.wire.record import RECORDED, as_text


@pytest.mark.parametrize("name", CONTRACT)
def test_an_interface_is_as_it_was_recorded(name: str) -> None:
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    found = json.loads(as_text(CONTRACT[name]()))
    assert found == recorded, "if it is to change: see tests/wire/record.py"


def test_everything_that_is_recorded_is_compared() -> None:
    assert {each.stem for each in RECORDED.glob("*.json")} == set(CONTRACT)
