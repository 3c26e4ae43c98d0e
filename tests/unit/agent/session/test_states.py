"""The table of states and transitions."""

from __future__ import annotations

import itertools

import pytest

from kernelproxy.agent.session.states import ALLOWED, State, check_transition
from kernelproxy.common.errors import InternalError


def test_every_state_is_in_the_table() -> None:
    assert set(ALLOWED) == set(State)


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
