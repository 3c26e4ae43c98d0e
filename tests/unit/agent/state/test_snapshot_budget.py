"""Start times of background snapshots."""

from __future__ import annotations

import random

import pytest

from kernelproxy.agent.state.snapshot_budget import (
    UPLOAD_BYTES,
    UPLOAD_COPIES,
    UPLOAD_COPIES_MAX,
    LogInflow,
    SnapshotBudget,
)

MIB = 1 << 20


def test_the_first_snapshot_may_begin_at_once_and_is_due_after_a_while() -> None:
    cadence = SnapshotBudget(replay_seconds=2.0)
    assert cadence.allowed(0.0)
    assert cadence.seconds_left(0.5, 7.0) == 1.5


@pytest.mark.parametrize(
    ("cost", "left"),
    [(0.0, 2.0), (0.001, 2.0), (0.1, 5.0), (-1.0, 2.0)],
)
def test_the_cost_of_a_snapshot_delays_the_next_one(cost: float, left: float) -> None:
    cadence = SnapshotBudget(share=0.02, replay_seconds=2.0)
    cadence.saved(10.0, 100.0, cost)
    assert cadence.seconds_left(10.0, 100.0) == pytest.approx(left)
    assert cadence.allowed(100.0) is (cost <= 0)
    assert cadence.allowed(100.0 + left)


def test_a_session_that_waits_for_data_is_saved_by_time_and_replays_little() -> None:
    cadence = SnapshotBudget(share=0.02, replay_seconds=2.0)
    cadence.saved(10.0, 100.0, 0.1)
    assert cadence.allowed(105.0)  # though it has executed for half a second only
    assert cadence.seconds_left(10.5, 105.0) == pytest.approx(1.5)


@pytest.mark.parametrize("seed", range(50))
def test_snapshots_take_their_share_and_no_more(seed: int) -> None:
    pick = random.Random(seed)
    share = pick.uniform(0.005, 0.5)
    cadence, busy, now, spent = SnapshotBudget(share), 0.0, 0.0, 0.0
    for _ in range(pick.randint(1, 50)):
        while (left := cadence.seconds_left(busy, now)) > 0:
            now += left
            busy += left * pick.choice((0.5, 1.0))  # whether or not it waits for its data
        assert cadence.allowed(now)
        cost = pick.choice((0.0, pick.uniform(0.0, 3.0)))
        spent += cost
        cadence.saved(busy, now, cost)
    now += max(cadence.seconds_left(busy, now), 0.0)
    assert spent <= share * now * (1 + 1e-9)


@pytest.mark.parametrize(
    ("head", "operators", "is_upload"),
    [
        (0, 0, False),  # nothing yet
        (16 * MIB, 0, True),  # tensor.to("cuda") is no operator
        (1024 * MIB, 300, True),  # a model, and one operator for each of its tensors
        (100 * MIB, 1000, False),  # a step, and its batch
        (UPLOAD_BYTES, 1, True),
        (UPLOAD_BYTES - 8, 1, False),
        (64 * MIB, 64 * MIB // 200, False),  # operators alone
    ],
)
def test_an_upload_is_recognised_by_its_few_operators(
    head: int, operators: int, is_upload: bool
) -> None:
    inflow = LogInflow()
    inflow.note(head, operators)
    assert inflow.is_upload is is_upload


def test_operators_before_the_snapshot_do_not_count() -> None:
    inflow = LogInflow()
    inflow.saved(10 * MIB, 100_000)
    inflow.note(300 * MIB, 100_020)
    assert inflow.is_upload
    inflow.saved(300 * MIB, 100_020)
    inflow.note(300 * MIB, 100_020)  # its client waits for room in the log
    assert inflow.is_upload
    inflow.note(301 * MIB, 101_000)
    assert not inflow.is_upload


@pytest.mark.parametrize(
    ("copies", "full", "worth"),
    [
        (0.0, False, True),
        (1.0, False, True),
        (UPLOAD_COPIES, False, True),
        (UPLOAD_COPIES + 0.1, False, False),
        (UPLOAD_COPIES + 0.1, True, True),
        (UPLOAD_COPIES_MAX, True, True),
        (UPLOAD_COPIES_MAX + 0.1, True, False),
    ],
)
def test_an_upload_is_saved_if_what_that_copies_is_of_the_size_of_what_came(
    copies: float, full: bool, worth: bool
) -> None:
    uploading, computing = LogInflow(), LogInflow()
    uploading.note(256 * MIB, 0)
    computing.note(256 * MIB, 256 * MIB // 200)
    dirty = int(copies * 256 * MIB)
    assert uploading.worth_saving(256 * MIB, dirty, full=full) is worth
    assert not computing.worth_saving(256 * MIB, dirty, full=full)
