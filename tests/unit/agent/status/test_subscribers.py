"""Selection of the changes of a session that subscribers receive."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproxy.agent.status.subscribers import differs
from tests.unit.fake_daemon import SESSION, changed

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("changes", "notified"),
    [
        ({}, False),
        ({"log_head": 7, "operators": 8, "queued_for": 9.0, "last_activity": "now"}, False),
        ({"state": "queued"}, True),
        ({"reason": "Another one."}, True),
        ({"progress": {"verb": "checkpoint", "checkpoint": "a", "done": 1, "total": 2}}, True),
        ({"queue_position": 1}, True),
        ({"worker_pid": None}, True),
        ({"job": "run", "rank": 0, "ranks": 2}, True),
    ],
)
def test_changes_that_are_not_shown_are_not_sent(changes: dict[str, Any], notified: bool) -> None:
    other = changed(SESSION, changes)
    assert differs(SESSION, other, 1.0, GIB) is notified
    assert differs(other, SESSION, 1.0, GIB) is notified


@pytest.mark.parametrize(
    ("total", "before", "now", "notified"),
    [
        (GIB, 100 * MIB, 105 * MIB, False),
        (GIB, 100 * MIB, 111 * MIB, True),  # more than one part in a hundred
        (80 * GIB, 100 * MIB, 115 * MIB, False),
        (80 * GIB, 117 * MIB, 100 * MIB, True),  # more than 16 MiB
        (80 * GIB, 1, 0, True),  # all of it
        (80 * GIB, 0, 1, False),
    ],
)
def test_memory_is_sent_where_it_is_visible(
    total: int, before: int, now: int, notified: bool
) -> None:
    one, other = SESSION | {"memory": before}, SESSION | {"memory": now}
    assert differs(one, other, 1.0, total) is notified


@pytest.mark.parametrize(
    ("before", "seconds", "now", "notified"),
    [
        (None, 1.0, None, False),
        (None, 1.0, 5.0, True),
        (5.0, 1.0, None, True),
        (60.0, 10.0, 50.0, False),  # as expected
        (60.0, 10.0, 55.0, False),
        (60.0, 10.0, 60.0, True),
        (3.0, 1.0, 2.5, False),
        (3.0, 1.0, 3.5, True),
    ],
)
def test_a_changed_wait_is_sent(
    before: float | None, seconds: float, now: float | None, notified: bool
) -> None:
    one, other = SESSION | {"expected_wait": before}, SESSION | {"expected_wait": now}
    assert differs(one, other, seconds, GIB) is notified
