"""Parents and children of sessions."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.lifecycle.family import PARENT_ENDED, Families
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import OpenSession


def a_session(name: str, owner: int = 7, parent: str = "", closing: bool = False) -> Any:
    request = OpenSession("n", "", "/python", parent=parent)
    done: list[str] = []
    core = SimpleNamespace(
        request=request, owner=owner, user="ada", closing=closing, inhibitors={},
        request_reconcile=lambda: done.append("reconcile"),
    )  # fmt: skip
    return SimpleNamespace(
        id=name, core=core, done=done, close=done.append, saver=SimpleNamespace(), child=name,
        kernel=SimpleNamespace(continues=(), pid=None),
    )  # fmt: skip


def families(*sessions: Any) -> Families:
    found = Families({each.id: each for each in sessions})
    for each in sessions:
        found.added(each)
    return found


def child(parent: str) -> OpenSession:
    return OpenSession("rank", "", "/python", script=True, parent=parent)


def test_a_parent_belongs_to_the_same_user() -> None:
    there = families(one := a_session("one"))
    assert there.parent(child("one"), 7, 1) is one
    assert there.parent(child(""), 7, 1) is None
    for uid in (8, 0):  # not even root's processes run below others' sessions
        with pytest.raises(ControlError, match="belongs to ada") as raised:
            there.parent(child("one"), uid, 1)
        assert raised.value.reason == "not-allowed"


def test_a_parent_is_named_by_its_whole_id_and_open() -> None:
    there = families(a_session("one", closing=True), a_session("other"))
    for name in ("one", "oth", "none"):
        with pytest.raises(ControlError, match="has ended") as raised:
            there.parent(child(name), 7, 1)
        assert raised.value.reason == "ended"


def test_a_restored_process_is_below_the_copy_that_has_started_it() -> None:
    original, copy = a_session("original"), a_session("copy")
    stranger = a_session("stranger", owner=8)
    for each in (copy, stranger):
        each.kernel.continues, each.kernel.pid = ("first", "original"), os.getppid()
    there = families(stranger, original, copy)
    for name in ("first", "original"):
        assert there.parent(child(name), 7, os.getpid()) is copy
    assert there.parent(child("original"), 7, 1) is original
    copy.kernel.pid = None
    assert there.parent(child("original"), 7, os.getpid()) is original


def test_a_session_with_children_is_inhibited_while_they_are_open() -> None:
    one, rank = a_session("one"), a_session("rank", parent="one")
    families(one, rank)
    (inhibits,) = one.core.inhibitors.values()
    assert inhibits()
    rank.core.closing = True
    assert not inhibits()


def test_children_are_found_with_their_own_and_parents_first() -> None:
    one, rank, other = a_session("one"), a_session("rank", parent="one"), a_session("other")
    below, second = a_session("below", parent="rank"), a_session("second", parent="one")
    families(below, second, rank, other, one)
    assert one.saver.find_children() == ["second", "rank", "below"]
    assert rank.saver.find_children() == ["below"]
    assert other.saver.find_children() == []


def test_a_session_that_closes_ends_its_children_and_lets_its_parent_hibernate() -> None:
    one, rank = a_session("one"), a_session("rank", parent="one")
    below, other = a_session("below", parent="rank"), a_session("other", parent="one")
    there = families(one, below, other)
    there.closed(rank)
    assert (one.done, below.done, other.done) == (["reconcile"], [PARENT_ENDED], [])


def test_sessions_whose_parents_are_not_recovered_are_ended() -> None:
    one, rank = a_session("one"), a_session("rank", parent="one")
    orphan = a_session("orphan", parent="gone")
    families(one, rank, orphan).end_orphans()
    assert (one.done, rank.done, orphan.done) == ([], [], [PARENT_ENDED])
