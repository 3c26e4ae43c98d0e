"""The sessions with which a session shares its device: the text is stable while turns change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.devices.co_tenants import shared
from kernelproxy.agent.devices.usage_history import LATELY_SECONDS, WINDOW_SECONDS, UsageHistory


def tenant(name: str, owner: int = 1) -> Any:
    user = "ada" if owner == 1 else "bob"
    return SimpleNamespace(id=name, name=f"{name}.ipynb", owner=owner, user=user, wants_turns=True)


def allocator(device: str, *tenants: Any) -> Any:
    found = {each.id: each for each in tenants}
    return SimpleNamespace(device=SimpleNamespace(id=device), tenants=found, history=UsageHistory())


def take_turns(here: Any, names: str, seconds: float, start: float, end: float) -> float:
    """Let the sessions named in a string have turns, one after the other."""
    now, turn = start, 0
    while now < end:
        here.history.began(names[turn % len(names)], now)
        now += seconds
        here.history.ended(names[turn % len(names)], now)
        turn += 1
    return now


def test_sessions_that_take_turns_show_the_same_in_each_turn() -> None:
    a, b = tenant("a"), tenant("b", owner=2)
    here = allocator("cpu:0", a, b)
    now, told = take_turns(here, "ab", 1.0, 0.0, 60.0), set[str]()
    for turn in range(20):
        name = "ab"[turn % 2]
        here.history.began(name, now)
        for part in (0.1, 0.5, 0.9):
            told.add(str((shared(a, [here], now + part), shared(b, [here], now + part))))
        now += 1.0
        here.history.ended(name, now)
    assert told == {
        str(
            (
                {"devices": ["cpu:0"], "with": ["bob"], "share": 0.5},
                {"devices": ["cpu:0"], "with": ["ada"], "share": 0.5},
            )
        )
    }


def test_time_before_the_other_session_joined_is_no_part_of_a_share() -> None:
    a, b = tenant("a"), tenant("b")
    here = allocator("cpu:0", a, b)
    now = take_turns(here, "a", 1.0, 0.0, 25.0)
    waiting = shared(a, [here], now)
    assert waiting is not None
    assert waiting["share"] == 1.0  # b waits for its first turn
    now = take_turns(here, "b", 1.0, now, now + 1.0)
    for end, shares in ((0.0, (0.45, 0.55)), (3.0, (0.5, 0.5)), (30.0, (0.5, 0.5))):
        now = take_turns(here, "ab", 1.0, now, now + end)
        told = [shared(one, [here], now) for one in (a, b)]
        assert all(told)
        assert tuple(each["share"] for each in told if each) == pytest.approx(shares, abs=0.051)


def test_three_on_two_devices_that_move_read_the_same_all_the_time() -> None:
    those = [tenant(each) for each in "abc"]
    allocators = [allocator("cpu:0", *those[:2]), allocator("cpu:1", those[2])]
    devices, told = ("ab", "ca", "bc"), set[str]()
    now = 0.0
    for turn in range(60):  # the waiting one goes where there is room: a third of each for each
        pair = devices[turn % 3]
        for there, name in zip(allocators, pair, strict=True):
            there.tenants = {each.id: each for each in those if each.id == name}
            there.history.began(name, now)
        waits = next(each for each in those if each.id not in pair)
        allocators[turn % 2].tenants[waits.id] = waits
        if turn > 30:
            told |= {str(shared(each, allocators, now + 0.5)) for each in those}
        now += 2.0
        for there, name in zip(allocators, pair, strict=True):
            there.history.ended(name, now)
    both = ["cpu:0", "cpu:1"]
    assert told <= {
        str({"devices": both, "with": others, "share": share})
        for others in (["a.ipynb", "b.ipynb"], ["a.ipynb", "c.ipynb"], ["b.ipynb", "c.ipynb"])
        for share in (0.3, 0.35)
    }


@pytest.mark.parametrize("change", ["rests", "waits long", "never ran", "others rest"])
def test_a_session_that_takes_no_turns_shares_nothing(change: str) -> None:
    a, b = tenant("a"), tenant("b")
    here = allocator("cpu:0", a, b)
    now = take_turns(here, "b" if change == "never ran" else "ab", 1.0, 0.0, 10.0)
    if change == "rests":
        a.wants_turns = False
    elif change == "waits long":
        now = take_turns(here, "b", 1.0, now, now + LATELY_SECONDS + 2.0)
    elif change == "others rest":
        b.wants_turns = False
        assert shared(a, [here], now) is not None  # its turn has just ended
        now = take_turns(here, "a", 1.0, now, now + 4.0)
    assert shared(a, [here], now) is None


def test_a_history_is_as_long_as_its_window() -> None:
    history = UsageHistory()
    for turn in range(1000):
        history.began("a", turn)
        history.ended("a", turn + 0.5)
    assert len(history._past) <= WINDOW_SECONDS + 2
    assert history.seconds(1000.0) == {"a": 15.0}
    assert history.since("a", 1000.0) == 0.5
    assert history.since("b", 1000.0) == float("inf")
