"""Steps and nadirs found in stretches of log."""

from __future__ import annotations

import random

import pytest

from jupyter_sing.scheduler.introspection import Digest, rhythm


def stretch(
    pattern: list[tuple[int, int]], repeats: int, step: float = 0.5, prologue: int = 0
) -> list[Digest]:
    """Records of (kind, memory), again and again, after some that are all different."""
    records = [(10_000 + i, 5) for i in range(prologue)] + pattern * repeats
    seconds = step / len(pattern)
    return [Digest(i * seconds, kind, memory) for i, (kind, memory) in enumerate(records)]


@pytest.mark.parametrize("prologue", [0, 37])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_a_repeated_stretch_is_a_step(length: int, prologue: int) -> None:
    pattern = [(kind, 100 + kind) for kind in range(length)]
    found = rhythm(stretch(pattern, 5, prologue=prologue))
    assert found is not None
    assert found.records == length
    assert found.step_seconds == pytest.approx(0.5)


def test_the_nadir_is_where_memory_is_least() -> None:
    pattern = [(0, 50), (1, 90), (2, 20), (3, 60)]
    found = rhythm(stretch(pattern, 4))
    assert found is not None
    assert found.nadir == pytest.approx(0.5)
    assert (found.memory_min, found.memory_max) == (20, 90)


def test_inner_loops_are_not_taken_for_the_step() -> None:
    layer = [(1, 10), (2, 20)]
    step = layer * 4 + [(3, 30), (4, 5), (5, 9)]
    found = rhythm(stretch(step, 4))
    assert found is not None
    assert found.records == len(step)


def test_a_record_now_and_then_is_forgiven() -> None:
    pattern = [(kind, kind) for kind in range(50)]
    records = stretch(pattern, 6)
    records[-60] = Digest(records[-60].at, 77_777, 0)
    found = rhythm(records)
    assert found is not None
    assert found.records == 50


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_nothing_is_found_where_nothing_repeats(count: int) -> None:
    kinds = list(range(count))
    random.Random(1).shuffle(kinds)
    assert rhythm([Digest(float(i), kind, 1) for i, kind in enumerate(kinds)]) is None


def test_twice_is_not_often() -> None:
    assert rhythm(stretch([(kind, 1) for kind in range(10)], 2)) is None


def test_a_pause_does_not_change_the_step_time() -> None:
    records = stretch([(kind, 1) for kind in range(10)], 8)
    late = [Digest(r.at + (100.0 if i > 45 else 0.0), r.kind, 1) for i, r in enumerate(records)]
    found = rhythm(late)
    assert found is not None
    assert found.step_seconds == pytest.approx(0.5)
