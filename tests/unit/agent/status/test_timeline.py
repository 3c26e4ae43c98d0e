"""Spans and steps agree with the changes, and merging loses no more than it should."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kernelproxy.agent.status.timeline import (
    HELD,
    Change,
    Span,
    Step,
    Timeline,
    coarser,
    cut,
    merged,
)

SINCE, UNTIL = 20.0, 80.0
STATES = [*HELD, "queued", "suspended", "failed", "away", "ended"]
moments = st.integers(0, 100).map(float)
resolutions = st.sampled_from([0.5, 1.0, 3.0, 10.0, 1000.0])


@st.composite
def histories(draw: st.DrawFn) -> list[Change]:
    ats = sorted(draw(st.lists(moments, max_size=40)))
    return [
        Change(
            at,
            draw(st.sampled_from("ab")),
            draw(st.sampled_from(["cpu:0", "cpu:1"])),
            draw(st.sampled_from(STATES)),
        )
        for at in ats
    ]


def state_at(history: list[Change], session: str, at: float) -> tuple[str, str] | None:
    """Return device and state of a session after a whole second: those of its last change."""
    last = [each for each in history if each.session == session and each.at <= at]
    return (last[-1].device, last[-1].state) if last and last[-1].state in HELD else None


def spans(history: list[Change], *resolutions: float) -> list[Span]:
    """Return spans, merged at coarser and coarser resolutions."""
    found = Timeline(history, SINCE, UNTIL).spans()
    for each in resolutions:
        found = coarser(found, each)
    return found


def covers(found: list[Span], session: str, at: float) -> list[Span]:
    return [e for e in found if e.session == session and e.start <= at < e.end]


@given(histories())
def test_at_each_moment_a_span_has_the_value_of_the_last_change(history: list[Change]) -> None:
    found = spans(history)
    for session in "ab":
        for at in range(100):
            there = covers(found, session, at + 0.5)
            said = state_at(history, session, at) if SINCE <= at < UNTIL else None
            assert [(each.device, each.state) for each in there] == ([said] if said else [])


@given(histories(), resolutions)
def test_merged_spans_are_fewer_and_cover_the_same_as_far_as_can_be_seen(
    history: list[Change], resolution: float
) -> None:
    fine, coarse = spans(history), spans(history, resolution / 4, resolution / 2, resolution)
    assert len(coarse) <= len(fine)
    assert [each.start for each in coarse] == sorted(each.start for each in coarse)
    assert all(SINCE <= each.start < each.end <= UNTIL for each in coarse)
    for session in "ab":
        mine = [each for each in coarse if each.session == session]
        assert all(one.end <= other.start for one, other in pairwise(mine))
        for at in range(20, 80):
            truth, seen = covers(fine, session, at + 0.5), covers(coarse, session, at + 0.5)
            if truth:  # each session that held a device is visible
                assert seen
                assert seen[0].device == truth[0].device
            elif seen:  # and none is visible for long that held none
                near = [e for e in fine if e.session == session and e.device == seen[0].device]
                assert min(max(e.start - at, at - e.end) for e in near) <= resolution


@given(histories(), resolutions)
def test_long_work_is_seen_as_work(history: list[Change], resolution: float) -> None:
    fine, coarse = spans(history), spans(history, resolution / 4, resolution / 2, resolution)
    for each in fine:
        if each.state == "running" and each.end - each.start >= resolution:
            (seen,) = covers(coarse, each.session, each.start)
            assert seen.state == "running"


def test_cells_that_follow_each_other_are_one() -> None:
    def change(at: float, state: str) -> Change:
        return Change(at, "a", "cpu:0", state)

    history = [change(0, "idle")]
    for at in range(100, 110):
        history += [change(at, "running"), change(at + 0.6, "idle")]
    history += [change(200, "running"), change(200.1, "idle"), change(300, "suspended")]
    found = Timeline(history, 0, 1000).spans()
    assert [(each.state, each.start, each.end) for each in coarser(found, 1.0)] == [
        ("idle", 0, 100),
        ("running", 100, 109.6),
        ("idle", 109.6, 200),
        ("running", 200, 200.1),
        ("idle", 200.1, 300),
    ]


def test_merged_spans_do_not_count_the_gap() -> None:
    history = [
        Change(at + more, "a", "cpu:0", state)
        for at in range(100, 200, 10)
        for more, state in ((0, "running"), (0.5, "idle"), (1, "suspended"))
    ]
    found = Timeline(history, 0, 1000).spans()
    (one,) = coarser(found, 432.0)
    assert (one.state, one.start, one.end, one.seconds) == ("running", 100, 191, 5.0)
    assert sum(each.seconds for each in found if each.state == "running") == one.seconds


def test_a_clock_that_is_set_back_makes_no_time_run_backwards() -> None:
    history = [
        Change(50, "a", "cpu:0", "running"),
        Change(40, "a", "cpu:0", "idle"),
        Change(60, "a", "cpu:0", "ended"),
    ]
    assert Timeline(history, 0, 100).spans() == [Span("a", "cpu:0", "idle", 50, 60, 10)]


@given(histories())
def test_the_queue_is_counted(history: list[Change]) -> None:
    steps = Timeline(history, SINCE, UNTIL).queues().get("cpu:0", [(SINCE, 0)])
    assert steps[0][0] == SINCE
    for at in range(20, 80):
        last = {e.session: e for e in history if e.at <= at}
        waiting = sum(e.state == "queued" and e.device == "cpu:0" for e in last.values())
        assert value_at(steps, at + 0.5) == waiting


def value_at(steps: list[Step], at: float) -> int:
    return [value for moment, value in steps if moment <= at][-1]


values = st.lists(st.tuples(moments, st.integers(0, 9)), max_size=40).map(
    lambda found: sorted(found, key=lambda step: step[0])
)


@given(values, resolutions)
def test_merged_steps_lose_no_peak_and_end_alike(steps: list[Step], resolution: float) -> None:
    inside = cut(steps, SINCE, UNTIL)
    few = merged(inside, resolution)
    assert few[0][0] == SINCE
    assert few[-1][1] == inside[-1][1]
    assert max(value for _, value in few) == max(value for _, value in inside)
    assert [at for at, _ in few] == sorted(at for at, _ in few)
    assert len(few) <= 2 * ((UNTIL - SINCE) / resolution + 1)
    for at, value in few:  # each existed, at about that time
        assert any(abs(at - moment) <= resolution and value == v for moment, v in inside)
