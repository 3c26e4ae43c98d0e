"""Grants of device memory, and the sessions that are evicted for them."""

from __future__ import annotations

import random

import pytest

from kernelproxy.agent.devices.memory_grants import GrantPlan, GrantTable, Neighbour, plan_room
from kernelproxy.common.errors import InternalError


def test_grants_come_in_steps_as_long_as_there_is_room() -> None:
    ledger = GrantTable(total=100, step=30)
    assert ledger.rounded("a", 1) == 30
    ledger.hold("a", 30)
    assert ledger.rounded("b", 65) == 70  # all that is left
    assert ledger.rounded("b", 70) == 70
    assert ledger.rounded("a", 31) == 60


def test_a_session_is_short_of_what_others_hold() -> None:
    ledger = GrantTable(total=100, step=10)
    ledger.hold("a", 60)
    assert ledger.short("a", 100) == 0
    assert ledger.short("b", 40) == 0
    assert ledger.short("b", 50) == 10
    ledger.release("a")
    ledger.release("a")
    assert ledger.free == 100


def test_more_than_there_is_cannot_be_held() -> None:
    ledger = GrantTable(total=100, step=10)
    ledger.hold("a", 60)
    with pytest.raises(InternalError):
        ledger.hold("b", 41)
    with pytest.raises(InternalError):
        ledger.hold("b", -1)
    assert ledger.of("b") == 0


def test_no_room_is_made_where_none_lacks() -> None:
    assert plan_room(0, [Neighbour("a", 10, 0, 0.0)]) == GrantPlan()


def test_unused_grants_are_revoked_before_any_session_is_suspended() -> None:
    neighbours = [Neighbour("small", 20, 15, 1.0), Neighbour("large", 50, 20, None)]
    assert plan_room(30, neighbours) == GrantPlan(cut={"large": 20})
    assert plan_room(31, neighbours) == GrantPlan(cut={"large": 20, "small": 15})


def test_the_longest_idle_are_suspended_and_no_more_than_needed() -> None:
    neighbours = [
        Neighbour("new", 50, 50, 3.0),
        Neighbour("old", 10, 10, 1.0),
        Neighbour("middle", 20, 20, 2.0),
    ]
    assert plan_room(5, neighbours) == GrantPlan(suspend=["old"])
    assert plan_room(30, neighbours) == GrantPlan(suspend=["old", "middle"])
    assert plan_room(40, neighbours) == GrantPlan(suspend=["new"])


def test_busy_neighbours_are_not_suspended() -> None:
    neighbours = [Neighbour("busy", 50, 50, None), Neighbour("idle", 10, 10, 0.0)]
    assert plan_room(10, neighbours) == GrantPlan(suspend=["idle"])
    assert plan_room(11, neighbours) is None


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_frees_enough_and_evicts_no_more_than_needed(seed: int) -> None:
    chance = random.Random(seed)
    neighbours = [
        Neighbour(str(i), granted, chance.randrange(granted + 5), chance.choice([None, i * 1.0]))
        for i, granted in enumerate(chance.choices(range(100), k=6))
    ]
    by_name = {each.session: each for each in neighbours}
    short = chance.randrange(1, 300)
    plan = plan_room(short, neighbours)

    def freed(plan: GrantPlan) -> int:
        cut = sum(by_name[name].granted - grant for name, grant in plan.cut.items())
        return cut + sum(by_name[name].granted for name in plan.suspend)

    unused = sum(max(0, each.granted - each.used) for each in neighbours)
    used = sum(min(n.granted, n.used) for n in neighbours if n.idle_since is not None)
    assert (plan is None) == (unused + used < short), f"seed {seed}"
    if plan is not None:
        assert freed(plan) >= short
        assert not set(plan.cut) & set(plan.suspend)
        assert all(by_name[name].idle_since is not None for name in plan.suspend)
        for name in plan.suspend:  # each of them was needed
            spared = by_name[name].granted - min(by_name[name].granted, by_name[name].used)
            rest = sum(by_name[other].granted for other in plan.suspend if other != name)
            others = sum(
                max(0, each.granted - each.used)
                for each in neighbours
                if each.session not in plan.suspend
            )
            assert rest + spared + others < short, f"seed {seed}"
