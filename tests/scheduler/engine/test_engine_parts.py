"""The parts of the engine, each by a table."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler.decisions import Bound, NoPlacement
from jupyter_sing.scheduler.events import SessionAdded
from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger
from jupyter_sing.scheduler.fairness.mlfq import Gaps, SwapBudget, level_end, level_of, run_min
from jupyter_sing.scheduler.fairness.tier_targets import Account, Tally, admit
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.queue.gangs import fragmentation
from jupyter_sing.scheduler.queue.residency import HostMemoryEstimate, room
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, Tier
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, FreeDevices, Phase

GB = 10**9
SETTINGS = EngineSettings()


def flow(ledger: ServiceLedger, name: str, vc: str = "lab", weight: float = 1.0) -> Flow:
    return ledger.session(name, ledger.user(vc, name, 1.0, weight), 1.0)


def session(name: str, number: int, memory: int = 8 * GB, pinned: bool = False) -> EngineSession:
    opened = SessionAdded(0.0, name, "lab", name, memory=memory, pinned=pinned)
    return EngineSession(opened, number, flow(ServiceLedger(1), name))


def device(memory: int = 24 * GB, number: int = 0, node: str = "node0") -> EngineDevice:
    return EngineDevice(DeviceSpec(f"{node}/gpu{number}", memory, node), number, 0.05)


class TestFairness:
    def test_tag_is_service_over_weight(self) -> None:
        ledger = ServiceLedger(2)
        light, heavy = flow(ledger, "light"), flow(ledger, "heavy", weight=2.0)
        for each in (light, heavy):
            ledger.activate(each, 0.0)
            ledger.hold(each, 1, 0.0)
        assert light.parent is not None
        assert heavy.parent is not None
        assert light.parent.at(10.0) == pytest.approx(10.0)
        assert heavy.parent.at(10.0) == pytest.approx(5.0)

    def test_idleness_earns_nothing(self) -> None:
        ledger = ServiceLedger(1)
        busy, idle = flow(ledger, "busy"), flow(ledger, "idle")
        ledger.activate(busy, 0.0)
        ledger.hold(busy, 1, 0.0)
        ledger.activate(idle, 100.0)
        assert idle.parent is not None
        assert idle.parent.at(100.0) == pytest.approx(100.0)

    def test_waiting_flow_holds_virtual_time_back(self) -> None:
        ledger = ServiceLedger(1)
        busy, waiting = flow(ledger, "busy"), flow(ledger, "waiting")
        ledger.activate(waiting, 0.0)
        ledger.activate(busy, 0.0)
        ledger.hold(busy, 1, 0.0)
        assert busy.parent is not None
        assert ledger.lead(busy.parent, 30.0) == pytest.approx(30.0)
        ledger.deactivate(waiting, 30.0)
        assert ledger.lead(busy.parent, 31.0) == pytest.approx(0.0)

    def test_debt_stays_while_others_are_busy_and_ends_with_them(self) -> None:
        ledger = ServiceLedger(1)
        one, two, three = (flow(ledger, name) for name in ("one", "two", "three"))
        ledger.activate(one, 0.0)
        ledger.activate(two, 0.0)
        ledger.hold(one, 1, 0.0)
        ledger.hold(one, -1, 20.0)
        ledger.deactivate(one, 20.0)
        ledger.activate(one, 21.0)
        assert one.parent is not None
        assert ledger.lead(one.parent, 21.0) == pytest.approx(20.0)
        ledger.deactivate(one, 22.0)
        ledger.deactivate(two, 22.0)
        ledger.activate(three, 23.0)
        ledger.activate(one, 23.0)
        assert ledger.lead(one.parent, 23.0) == pytest.approx(0.0)

    def test_service_is_counted_on_the_whole_path(self) -> None:
        ledger = ServiceLedger(4)
        one = flow(ledger, "one")
        ledger.activate(one, 0.0)
        ledger.hold(one, 4, 1.0)
        ledger.hold(one, -4, 3.5)
        path = [one, one.parent, one.parent.parent if one.parent else None]
        assert [node.served for node in path if node] == [10.0, 10.0, 10.0]

    def test_bursts_are_made_up_for_at_half_the_share(self) -> None:
        ledger = ServiceLedger(1)
        user = flow(ledger, "one").parent
        assert user is not None
        assert ledger.burst(user, 30.0, 0.0) == 30.0
        assert ledger.burst(user, 0.0, 20.0) == pytest.approx(20.0)
        assert ledger.burst(user, 0.0, 1000.0) == 0.0


class TestFeedback:
    @pytest.mark.parametrize(
        ("attained", "level", "left"),
        [(0.0, 0, 2.0), (1.9, 0, 0.1), (2.0, 1, 10.0), (11.0, 1, 1.0), (71.0, 2, 1.0)],
    )
    def test_levels(self, attained: float, level: int, left: float) -> None:
        assert level_of(attained, SETTINGS) == level
        assert level_end(attained, SETTINGS) == pytest.approx(left)

    def test_last_level_has_no_end(self) -> None:
        assert level_of(72.0, SETTINGS) == 3
        assert level_end(72.0, SETTINGS) is None

    @pytest.mark.parametrize(
        ("level", "switch", "seconds"),
        [(0, 0.1, 1.0), (1, 3.0, 6.0), (2, 0.0, 1.0), (2, 0.4, 6.0), (3, 3.0, 45.0)],
    )
    def test_minimum_run(self, level: int, switch: float, seconds: float) -> None:
        assert run_min(level, switch, SETTINGS) == pytest.approx(seconds)

    def test_quanta_double_while_switches_take_too_much(self) -> None:
        budget = SwapBudget(0.05)
        assert budget.stretch(0.0) == 1.0
        budget.spend(4.0, 0.0)
        assert budget.stretch(1.0) == 2.0
        assert budget.stretch(21.0) == 1.0

    def test_gaps_follow_use_and_absence(self) -> None:
        gaps = Gaps(0.0)
        for at in range(10, 500, 10):
            gaps.used(float(at))
            gaps.idle(float(at))
        assert gaps.rate(490.0) == pytest.approx(0.1, rel=0.05)
        assert gaps.rate(1490.0) == pytest.approx(0.001)


def promised(goal: float, at: float = 0.0) -> Account:
    account = Account(at)
    account.set_goal(goal, at)
    account.tally = Tally()
    return account


class TestTiers:
    def test_fraction_is_granted_over_demand(self) -> None:
        account = Account(0.0)
        account.wait(0.0)
        account.execute(30.0)
        account.rest(100.0)
        assert account.fraction == pytest.approx(0.7)
        assert account.slack(0.7) == pytest.approx(0.0)

    @pytest.mark.parametrize(
        ("waited", "ran", "missed"), [(1.9, 0.1, 0), (2.1, 0.1, 1), (4.0, 100.0, 0)]
    )
    def test_two_seconds_may_always_be_lost(self, waited: float, ran: float, missed: int) -> None:
        account = promised(0.95)
        account.wait(0.0)
        account.execute(waited)
        account.rest(waited + ran)
        assert (account.slack(0.95) < 0.0) is bool(missed)
        account.settle(3599.0)
        assert account.tally == Tally(0)
        account.settle(3600.0)
        assert account.tally == Tally(missed)

    def test_a_target_is_judged_once_an_hour_however_many_cells_there_were(self) -> None:
        """A regression: it was counted at each cell, 356 times in a minute."""
        account = promised(0.7)
        account.wait(0.0)
        account.execute(20.0)
        for second in range(20, 3590, 10):
            account.rest(second + 0.01)
            account.execute(float(second + 10))
        account.settle(3599.0)
        assert account.tally == Tally(0)
        account.settle(3600.0)
        assert account.tally == Tally(1)

    def test_an_hour_begins_with_a_request(self) -> None:
        account = promised(0.7)
        account.wait(10_000.0)
        account.rest(10_100.0)
        account.settle(13_599.0)
        assert account.tally == Tally(0)
        account.settle(20_000.0)
        assert account.tally == Tally(1)
        account.wait(20_000.0)
        account.settle(34_400.0)
        assert account.tally == Tally(5)

    @pytest.mark.parametrize(("goal", "missed"), [(0.0, 0), (0.5, 0), (0.7, 1)])
    def test_only_a_set_target_is_missed(self, goal: float, missed: int) -> None:
        account = promised(goal)
        account.wait(0.0)
        account.execute(400.0)
        account.rest(1000.0)
        account.settle(3600.0)
        assert account.tally == Tally(missed)

    def test_another_target_begins_another_hour(self) -> None:
        account = promised(0.7)
        account.wait(0.0)
        account.set_goal(0.95, 1800.0)
        account.execute(1800.0)
        account.settle(5400.0)
        assert account.tally == Tally(0)

    def test_an_hour_continues_after_a_restart(self) -> None:
        before, after = promised(0.7), promised(0.7, 10_000.0)
        before.wait(0.0)
        before.rest(120.0)
        ages = [(1800.0 - at, d, g) for at, d, g in before.slots()]
        after.restore(ages, 10_000.0)
        after.settle(11_739.0)
        assert after.tally == Tally(0)
        after.settle(11_821.0)
        assert after.tally == Tally(1)

    def test_an_hour_is_remembered(self) -> None:
        account = Account(0.0)
        account.wait(0.0)
        account.rest(600.0)
        account.settle(3500.0)
        assert account.demand == pytest.approx(600.0)
        account.settle(3960.0)
        assert account.demand == pytest.approx(240.0)
        account.settle(90_000.0)
        assert account.demand == pytest.approx(0.0)

    def test_sums_equal_the_slots_after_long_demand(self) -> None:
        account = Account(0.0)
        account.execute(0.0)
        account.settle(100_000.0)
        assert account.demand == pytest.approx(3600.0, rel=0.02)
        assert account.fraction == pytest.approx(1.0)

    @pytest.mark.parametrize(
        ("tier", "demand", "kept", "word"),
        [
            (Tier.BASIC, {Tier.PREMIUM: 9.0}, True, "basic"),
            (Tier.PREMIUM, {Tier.PREMIUM: 3.0}, True, "premium"),
            (Tier.PREMIUM, {Tier.PREMIUM: 3.5}, False, "best effort"),
            (Tier.STANDARD, {Tier.STANDARD: 4.0}, True, "standard"),
            (Tier.STANDARD, {Tier.STANDARD: 5.0}, False, "best effort"),
            (Tier.PREMIUM, {Tier.STANDARD: 5.0}, False, "best effort"),
        ],
    )
    def test_admission(self, tier: Tier, demand: dict[Tier, float], kept: bool, word: str) -> None:
        answer = admit(tier, 1, demand, guaranteed=4, capacity=4)
        assert answer.kept is kept
        assert answer.reason.startswith(word)


class TestMemoryPart:
    def test_evictions_are_empty_while_all_fit(self) -> None:
        place = device()
        place.put(session("a", 1), 8 * GB)
        made = room(session("new", 2), place, 0.0)
        assert made is not None
        assert made.victims == ()

    def test_the_least_needed_session_is_evicted_first(self) -> None:
        place = device()
        often, seldom = session("often", 1), session("seldom", 2)
        for each in (often, seldom):
            place.put(each, 8 * GB)
            each.gaps.idle(0.0)
        for at in range(1, 50):
            often.gaps.used(float(at))
            often.gaps.idle(float(at))
        made = room(session("new", 3), place, 50.0)
        assert made is not None
        assert made.victims == (seldom,)

    @pytest.mark.parametrize("obstacle", ["pinned", "moving", "running", "loading", "reserved"])
    def test_sessions_in_flight_stay(self, obstacle: str) -> None:
        place = device()
        other = session("other", 1, 20 * GB, pinned=obstacle == "pinned")
        if obstacle == "moving":
            other.residency.moving[place] = None
        if obstacle in ("running", "loading", "reserved"):
            other.phase = Phase(obstacle)
        place.put(other, 20 * GB)
        assert room(session("new", 2), place, 0.0) is None

    def test_margin_is_kept_only_if_it_can_be(self) -> None:
        place = device()
        whole = session("whole", 1, 24 * GB)
        assert room(whole, place, 0.0) is not None
        assert room(session("more", 2, 25 * GB), place, 0.0) is None

    def test_clean_memory_leaves_at_once(self) -> None:
        place = device()
        other = session("other", 1, 20 * GB)
        place.put(other, 20 * GB)
        other.residency.clean_at = 5.0
        new = session("new", 2)
        dirty, clean = room(new, place, 4.0), room(new, place, 5.0)
        assert dirty is not None
        assert clean is not None
        assert dirty.seconds == pytest.approx(1.0)
        assert clean.seconds == 0.0

    def test_host_budget_is_per_node(self) -> None:
        host = HostMemoryEstimate(10 * GB)
        one, two = session("one", 1), session("two", 2)
        assert host.try_park(one, "node0", 8 * GB)
        assert not host.try_park(two, "node0", 8 * GB)
        assert host.try_park(two, "node1", 8 * GB)
        host.leave(one)
        assert host.used("node0") == 0
        assert host.try_park(one, "node0", 8 * GB)


class TestPlacesPart:
    def test_free_devices_are_ordered_by_room(self) -> None:
        free = FreeDevices()
        places = [device(number=number) for number in range(3)]
        places[0].put(session("a", 1), 8 * GB)
        places[2].put(session("b", 2), 2 * GB)
        for place in places:
            free.update(place)
        assert [place.number for place in free.roomiest(3)] == [1, 2, 0]
        places[1].healthy = False
        free.update(places[1])
        assert [place.number for place in free.roomiest(3)] == [2, 0]
        assert len(free.per_node["node0"]) == 2

    @pytest.mark.parametrize(
        ("free", "shapes", "useless"),
        [(0, {1: 1}, 0.0), (3, {1: 1}, 0.0), (3, {4: 1}, 3.0), (3, {1: 3, 4: 1}, 0.75)],
    )
    def test_fragmentation(self, free: int, shapes: dict[int, int], useless: float) -> None:
        assert fragmentation(free, shapes) == pytest.approx(useless)

    def test_flat_pool_honours_preference_and_health(self) -> None:
        pool = NoGuarantees(["a", "b", "c"])
        assert pool.place("one", "vc", -1, 1, ["b"]) == Bound(("b",), guaranteed=False)
        assert pool.place("two", "vc", -1, 2, ["b"]) == Bound(("a", "c"), guaranteed=False)
        assert isinstance(pool.place("three", "vc", -1, 1, []), NoPlacement)
        pool.set_health("b", False)
        pool.release("one")
        assert isinstance(pool.place("three", "vc", -1, 1, ["b"]), NoPlacement)
        pool.set_health("b", True)
        assert pool.place("three", "vc", -1, 1, []) == Bound(("b",), guaranteed=False)
