"""When background snapshots begin."""

from __future__ import annotations

import random

import pytest

from kernelproxy.agent.cadence import Cadence


def test_the_first_snapshot_may_begin_at_once_and_is_due_after_a_while() -> None:
    cadence = Cadence(replay_seconds=2.0)
    assert cadence.allowed(0.0)
    assert cadence.seconds_left(0.5) == 1.5


@pytest.mark.parametrize(
    ("cost", "left"),
    [(0.0, 2.0), (0.001, 2.0), (0.1, 5.0), (-1.0, 2.0)],
)
def test_what_a_snapshot_cost_keeps_the_next_one_away(cost: float, left: float) -> None:
    cadence = Cadence(share=0.02, replay_seconds=2.0)
    cadence.saved(10.0, cost)
    assert cadence.seconds_left(10.0) == pytest.approx(left)
    assert cadence.allowed(10.0) is (cost <= 0)
    assert cadence.allowed(10.0 + left)


@pytest.mark.parametrize("seed", range(50))
def test_snapshots_take_their_share_and_no_more(seed: int) -> None:
    pick = random.Random(seed)
    share = pick.uniform(0.005, 0.5)
    cadence, busy, spent = Cadence(share), 0.0, 0.0
    for _ in range(pick.randint(1, 50)):
        busy += max(cadence.seconds_left(busy), 0.0)
        assert cadence.allowed(busy + 1e-9)
        cost = pick.choice((0.0, pick.uniform(0.0, 3.0)))
        spent += cost
        cadence.saved(busy, cost)
    busy += max(cadence.seconds_left(busy), 0.0)
    assert spent <= share * busy * (1 + 1e-9)
