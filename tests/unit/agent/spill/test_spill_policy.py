"""Selection of sessions that are spilled to disk."""

from __future__ import annotations

import math

import pytest

from kernelproxy.agent.spill.spill_policy import SuspendedState, choose_cold, seconds_to_next

A, B, C = (
    SuspendedState("a", 10, 100.0),
    SuspendedState("b", 30, 50.0),
    SuspendedState("c", 20, 80.0),
)


@pytest.mark.parametrize(
    ("excess", "expected"),
    [
        (0, []),
        (-5, []),
        (1, ["b"]),
        (30, ["b"]),
        (31, ["b", "c"]),
        (50, ["b", "c"]),
        (51, ["b", "c", "a"]),
        (1000, ["b", "c", "a"]),
    ],
)
def test_the_longest_unused_are_spilled_first_and_no_more_than_needed(
    excess: int, expected: list[str]
) -> None:
    assert choose_cold([A, B, C], excess, now=110.0, cold_after=0.0) == expected


@pytest.mark.parametrize(
    ("cold_after", "expected", "left"),
    [
        (0.0, [], math.inf),
        (100.0, [], 40.0),
        (60.0, ["b"], 0.0),
        (30.0, ["b", "c"], 0.0),
        (5.0, ["b", "c", "a"], 0.0),
    ],
)
def test_a_session_unused_for_long_is_spilled_anyway(
    cold_after: float, expected: list[str], left: float
) -> None:
    assert choose_cold([A, B, C], 0, now=110.0, cold_after=cold_after) == expected
    assert seconds_to_next([A, B, C], 110.0, cold_after) == left


def test_a_session_that_frees_nothing_stays() -> None:
    empty = SuspendedState("e", 0, 0.0)
    assert choose_cold([empty, A], 5, now=110.0, cold_after=10.0) == ["a"]
    assert seconds_to_next([empty], 110.0, 10.0) == math.inf
