"""Waiting sessions receive their position, and an expected wait that users can plan with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, quantiles

import pytest

from jupyter_sing.controller.controller import COPY_RATE, LIVE, SWITCH_SECONDS
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Decision, Grant
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.explain.explain import ExplainedWait
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, QuotaLimits
from jupyter_sing.simulator.cluster import SimulatedCluster
from jupyter_sing.simulator.generator import Parameters, generate
from jupyter_sing.simulator.run import Simulation
from jupyter_sing.simulator.workload import Workload
from tests.doubles.scheduler.controller import FakeController

GB = 10**9


def machine(count: int = 1, found: EngineSettings = LIVE, memory: int = 24 * GB) -> FakeController:
    devices = [
        DeviceSpec(f"cpu:{n}", memory, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS)
        for n in range(count)
    ]
    return FakeController(Engine(devices, found), devices, delay=0.01)


def begin(host: FakeController, name: str, seconds: float, **terms: object) -> None:
    host.open(name, **{"memory": GB, "user": name, **terms})  # type: ignore[arg-type]
    host.submit(name, seconds)


def outlook(host: FakeController, name: str) -> ExplainedWait:
    found = host.engine.explain(name, host.now)
    assert found is not None
    return found


def granted(host: FakeController, name: str) -> float:
    """Seconds from now to the next grant of a session."""
    since = host.now
    while True:
        host.run_until(host.now + 0.01)
        for at, decision in host.decided:
            if at > since and isinstance(decision, Grant) and decision.session == name:
                return at - since


class TestWaits:
    def test_the_second_of_two_waits_for_the_rest_of_the_turn(self) -> None:
        host = machine()
        for name in ("first", "second"):
            begin(host, name, 10_000.0)
        host.run_until(500.0)
        for _ in range(20):
            (name,) = host.engine.outlooks(host.now)
            found = outlook(host, name)
            assert found.position == 1
            assert found.expected_wait is not None
            (holder,) = {"first", "second"} - {name}
            assert found.where in (
                f"cpu:0 (in use by {holder})",
                f"cpu:0 ({holder} goes first)",
                "",  # certainly has the next turn
            )
            assert granted(host, name) == pytest.approx(found.expected_wait, abs=0.6)

    def test_earlier_waiters_have_their_turns_first(self) -> None:
        host = machine()
        names = [f"s{index}" for index in range(5)]
        for name in names:
            begin(host, name, 10_000.0)
        host.run_until(900.3)
        found = host.engine.outlooks(host.now)
        assert sorted(each.position for each in found.values()) == [1, 2, 3, 4]
        expected = sorted((each.position, each.expected_wait or 0.0) for each in found.values())
        waits = [wait for _, wait in expected]
        assert waits == sorted(waits)
        assert waits[-1] - waits[0] == pytest.approx(3 * LIVE.quanta[-1], rel=0.3)

    def test_a_short_cell_is_expected_before_a_long_one(self) -> None:
        host = machine()
        for name in ("long", "longer"):
            begin(host, name, 10_000.0)
        host.run_until(500.0)
        begin(host, "short", 1.0)
        found = host.engine.outlooks(host.now)
        (other,) = found.keys() - {"short"}
        assert (found["short"].position, found[other].position) == (1, 2)
        assert (found["short"].expected_wait or 0.0) <= 1.1

    def test_unpreemptible_holders_are_waited_for(self) -> None:
        host = machine()
        begin(host, "rigid", 10_000.0, may_preempt=False)
        host.run_until(400.0)
        begin(host, "other", 1.0)
        # As long again as it has lasted: there is no better estimate.
        assert outlook(host, "other").expected_wait == pytest.approx(400.0, rel=0.05)


class TestPlaces:
    def test_only_sessions_eligible_for_the_device_are_before_one_pinned_to_it(self) -> None:
        host = machine(2)
        for name, device in (("a", "cpu:0"), ("b", "cpu:1")):
            begin(host, name, 10_000.0, may_preempt=False, bound=device, device=device)
        for index in range(3):
            begin(host, f"left{index}", 1.0, bound="cpu:0", device="cpu:0")
        begin(host, "right", 1.0, bound="cpu:1", device="cpu:1")
        begin(host, "anywhere", 1.0)
        found = host.engine.outlooks(host.now)
        assert {name: each.position for name, each in found.items()} == {
            "left0": 1, "left1": 2, "left2": 3, "right": 1, "anywhere": 5,
        }  # fmt: skip
        assert found["left1"].where == "cpu:0 (in use by a)"
        assert found["right"].where == "cpu:1 (in use by b)"

    def test_within_a_limit_only_their_own_are_before(self) -> None:
        limits = {("default", "grace"): QuotaLimits(devices=1)}
        host = machine(2, EngineSettings(quanta=(2.0, 2.0, 4.0, 4.0), user_limits=limits))
        for index in range(3):
            begin(host, f"s{index}", 10_000.0, user="grace")
        for name in ("x", "y"):
            begin(host, name, 10_000.0)
        host.run_until(500.3)
        found = host.engine.outlooks(host.now)
        mine = [each for name, each in found.items() if name.startswith("s")]
        assert sorted(each.position for each in mine) == [1, 2]
        assert all("grace has 1 of 1 device" in each.reason for each in mine)
        assert all(each.expected_wait is not None and each.expected_wait < 20.0 for each in mine)


class TestNoEstimate:
    def test_room_within_a_limit_has_no_estimate(self) -> None:
        limits = {("default", "grace"): QuotaLimits(device_memory=10 * GB)}
        host = machine(2, EngineSettings(user_limits=limits))
        begin(host, "large", 1000.0, user="grace", memory=8 * GB)
        begin(host, "other", 1.0, user="grace", memory=8 * GB)
        host.run_until(20.0)
        found = outlook(host, "other")
        assert (found.position, found.expected_wait) == (1, None)
        assert "waits until some of it is given back" in found.reason

    def test_room_behind_pinned_memory_has_no_estimate(self) -> None:
        host = machine()
        begin(host, "pinned", 10_000.0, memory=20 * GB, pinned=True)
        host.run_until(10.0)
        begin(host, "large", 1.0, memory=10 * GB)
        host.run_until(20.0)
        assert outlook(host, "large").expected_wait is None

    def test_impossible_requests_wait_without_end(self) -> None:
        host = machine()
        begin(host, "huge", 1.0, memory=30 * GB)
        begin(host, "other", 1000.0)
        begin(host, "next", 1.0)
        assert outlook(host, "huge").expected_wait == math.inf
        assert outlook(host, "next").position == 1


def test_several_devices_are_waited_for_at_once() -> None:
    host = machine(2)
    for name in ("a", "b"):
        begin(host, name, 10_000.0, may_preempt=False)
        host.run_until(host.now + 200.0)
    begin(host, "gang", 50.0, gpus=2)
    found = outlook(host, "gang")
    assert found.where == "2 devices"
    assert found.expected_wait == pytest.approx(400.0, rel=0.05)  # of the one with more service


# ------------------------------------------------------------------------ accuracy


class Asked:
    """The engine, queried whenever a session begins to wait, and at intervals.

    Attributes
    ----------
    pairs : list of (float, float)
        Expected and actual seconds, of waits of a tenth of a second or more.
    """

    def __init__(self, engine: Engine, every: float) -> None:
        self.engine, self.every = engine, every
        self.pairs: list[tuple[float, float]] = []
        self.decided: list[Decision] = []
        self._open: dict[str, list[tuple[float, float]]] = {}
        self._looked = 0.0

    def next_tick(self) -> float | None:
        return self.engine.next_tick()

    def handle(self, event: Event) -> Sequence[Decision]:
        now, decisions = event.at, self.engine.handle(event)
        self.decided += decisions
        for decision in decisions:
            if isinstance(decision, Grant):
                for at, expected in self._open.pop(decision.session, ()):
                    if max(expected, now - at) >= 0.1:
                        self.pairs.append((expected, now - at))
        looks = now >= self._looked + self.every
        if looks or isinstance(event, events.CellSubmitted | events.Released):
            self._looked = now if looks else self._looked
            for name, found in self.engine.outlooks(now).items():
                new = name == getattr(event, "session", None)
                if (looks or new) and found.expected_wait is not None:
                    self._open.setdefault(name, []).append((now, found.expected_wait))
        return decisions


def cluster(gpus: int) -> SimulatedCluster:
    return SimulatedCluster(gpus, bandwidth=COPY_RATE, switch=SWITCH_SECONDS)


def half_a_day(load: float) -> Workload:
    """Return notebooks that have work for this many devices on average."""
    return generate(Parameters(sessions=12, training=120, quick=600, days=0.5, load=load))


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "load"), [(1, 0.85), (2, 1.6)])
def test_expected_waits_are_close_to_actual_waits(gpus: int, load: float) -> None:
    asked = Asked(Engine(cluster(gpus).devices(), LIVE), every=30.0)
    Simulation(half_a_day(load), cluster(gpus), asked).run()
    ratios = [(actual + 0.05) / (expected + 0.05) for expected, actual in asked.pairs]
    assert len(ratios) > 1000
    assert 0.8 <= median(ratios) <= 1.25
    lower, _, upper = quantiles(ratios, n=4)
    assert lower >= 0.5
    assert upper <= 2.0
    # The length of a cell that has just begun is unknown.
    assert sum(1 / 3 <= each <= 3 for each in ratios) >= 0.7 * len(ratios)


@pytest.mark.slow
def test_forecasts_change_no_decision() -> None:
    decided = []
    for every in (0.0, math.inf):
        asked = Asked(Engine(cluster(2).devices(), LIVE), every)
        if every:
            asked.engine.outlooks = lambda now: {}  # type: ignore[method-assign]
        Simulation(half_a_day(1.2), cluster(2), asked).run()
        decided.append([repr(each) for each in asked.decided])
    assert decided[0] == decided[1]
    assert len(decided[0]) > 1000
