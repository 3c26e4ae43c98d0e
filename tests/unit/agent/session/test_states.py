"""The table of states and transitions."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from jupyter_sing.notebook import status_text, view_model
from kernelproxy.agent.session.states import ALLOWED, TRAITS, State, check_transition
from kernelproxy.agent.status.timeline import HELD
from kernelproxy.common.errors import InternalError

ROOT = Path(__file__).resolve().parents[4]


def test_every_state_is_in_the_table() -> None:
    assert set(ALLOWED) == set(TRAITS) == set(State)


def test_only_what_the_table_names_is_allowed() -> None:
    for before, after in itertools.product(State, State):
        if after in ALLOWED[before] or after is before:
            check_transition(before, after)
        else:
            with pytest.raises(InternalError, match=f"from {before} to {after}"):
                check_transition(before, after)


def test_everything_can_fail_and_nothing_recovers_from_it() -> None:
    told = {State.PREPARING}  # no session is ever in this one
    assert all(State.FAILED in ALLOWED[each] for each in {*State} - {State.FAILED} - told)
    assert not ALLOWED[State.FAILED]
    assert not any(ALLOWED[each] for each in told)
    assert not any(told & ways for ways in ALLOWED.values())


def test_nothing_is_suspended_or_queued_for_ever() -> None:
    for state in (State.SUSPENDED, State.QUEUED):
        assert State.RESTORING in ALLOWED[state]


def enums(text: str) -> list[set[str]]:
    """Return the enumerations in a YAML file that name a state."""
    found = [
        {each.strip() for each in names.split(",")}
        for names in re.findall(r"enum: \[([a-z,\s]+)\]", text)
    ]
    return [each for each in found if each & {*State}]


def test_the_interfaces_have_these_states() -> None:
    server = ROOT / "jupyter_sing/server"
    on_device = {str(each) for each in State if TRAITS[each].occupies}
    assert {*HELD} == on_device
    for path, expected in (
        ("openapi.yaml", [on_device, {*State}]),
        ("events/session-v1.yaml", [{*State}]),
    ):
        assert enums((server / path).read_text("utf-8")) == expected


def test_the_notebook_has_a_word_and_a_glyph_for_each_state() -> None:
    assert {*status_text.WORDS} == {*State}
    assert {*view_model.GLYPHS} >= {*State}


def test_jupyterlab_has_an_icon_for_each_state() -> None:
    """`tsc` checks its other tables: their keys are the enumeration of ``openapi.yaml``."""
    icons = (ROOT / "labextension/src/ui/icons.ts").read_text("utf-8")
    table = icons[icons.index("const SHAPES") : icons.index("};")]
    assert {*re.findall(r"^  (\w+):", table, re.MULTILINE)} == {*State, "cpu", "unreachable"}


def test_jupyterlab_has_the_properties_of_the_table() -> None:
    """`tsc` checks that no state is missing."""
    text = (ROOT / "labextension/src/api/states.ts").read_text("utf-8")
    executing = {
        name
        for name, traits in re.findall(r"^  (\w+): \{(.*)\},?$", text, re.MULTILINE)
        if "executes: true" in traits
    }
    assert executing == {str(each) for each in State if TRAITS[each].executes}
    ranks = {name: int(rank) for name, rank in re.findall(r"^  (\w+): (\d+)", text, re.MULTILINE)}
    assert ranks == {str(each): TRAITS[each].occupies for each in State if TRAITS[each].occupies}


def test_charts_show_the_most_specific_state() -> None:
    assert HELD == ("idle", "restoring", "migrating", "running")
