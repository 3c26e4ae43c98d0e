"""The engine as a whole, in virtual time; the double checks every decision."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Evict, Grant, MigrateMemory, Preempt, Queued
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9


def controller(
    count: int = 1,
    memory: int = 24 * GB,
    settings: EngineSettings | None = None,
    per_node: int = 8,
    constant: float = 0.0,
) -> FakeController:
    devices = [
        DeviceSpec(
            f"node{index // per_node}/gpu{index % per_node}",
            memory,
            f"node{index // per_node}",
            constant_seconds=constant,
        )
        for index in range(count)
    ]
    return FakeController(Engine(devices, settings), devices, delay=0.01)


def grants(host: FakeController, session: str) -> list[Grant]:
    return [d for _, d in host.decided if isinstance(d, Grant) and d.session == session]


def wait_of(host: FakeController, session: str) -> float:
    return next(wait for name, wait in reversed(host.waits) if name == session)


def test_a_cell_starts_at_once_on_a_free_device() -> None:
    host = controller()
    host.open("a", 8 * GB)
    host.submit("a", 5.0)
    host.run_until(10.0)
    assert wait_of(host, "a") == pytest.approx(0.4)
    assert host.executing("node0/gpu0") == []
    assert host.resident["node0/gpu0"] == {"a": 8 * GB}


def test_a_session_comes_back_to_its_memory() -> None:
    host = controller(2)
    host.open("a", 8 * GB)
    host.submit("a", 1.0)
    host.run_until(5.0)
    host.submit("a", 1.0)
    host.run_until(10.0)
    first, second = grants(host, "a")
    assert first.devices == second.devices
    assert wait_of(host, "a") == pytest.approx(0.01)


def test_a_short_cell_preempts_a_long_one() -> None:
    host = controller()
    host.open("long", 8 * GB)
    host.open("short", 8 * GB)
    host.submit("long", 1000.0)
    host.run_until(100.0)
    host.submit("short", 1.0)
    host.run_until(110.0)
    assert wait_of(host, "short") < 1.0
    host.run_until(1100.0)
    assert host.served("long") == pytest.approx(1000.0)


def test_a_short_cell_preempts_at_home_and_the_long_one_moves() -> None:
    host = controller(2, memory=17 * GB)
    host.open("short", 8 * GB)
    host.submit("short", 1.0)
    host.run_until(2.0)
    home = grants(host, "short")[0].devices
    host.open("other", 8 * GB)
    host.submit("other", 50.0)  # takes the other device, which has more room
    host.run_until(4.0)
    host.open("long", 8 * GB)
    host.submit("long", 1000.0)
    host.run_until(100.0)
    assert grants(host, "long")[0].devices == home
    host.submit("short", 30.0)
    host.run_until(110.0)
    assert grants(host, "short")[-1].devices == home
    assert wait_of(host, "short") < 0.1
    assert grants(host, "long")[-1].devices != home


def test_leases_are_not_preempted_before_the_minimum_run() -> None:
    host = controller(constant=1.0)
    for name in ("a", "b", "c"):
        host.open(name, 8 * GB)
        host.submit(name, 300.0)
    host.run_until(1000.0)
    started: dict[int, float] = {}
    for at, event in host.log:
        if isinstance(event, events.Started):
            started[event.token] = at
    ends = [(at, d.token) for at, d in host.decided if isinstance(d, Preempt)]
    assert ends
    assert all(at - started[token] >= 1.0 for at, token in ends)


def test_a_session_that_was_just_resumed_runs_for_a_second() -> None:
    host = controller()
    for name in ("long", "one", "two"):
        host.open(name, GB)
    host.submit("long", 1000.0)
    host.run_until(100.0)
    host.submit("one", 1.0)
    host.run_until(101.3)
    assert host.executing("node0/gpu0") == ["long"]
    resumed = host.notebooks["long"].since
    assert resumed is not None
    host.submit("two", 1.0)
    host.run_until(105.0)
    stops = [at for at, d in host.decided if isinstance(d, Preempt) and d.session == "long"]
    assert stops[-1] == pytest.approx(resumed + 1.0)


def test_long_cells_of_two_users_get_equal_service() -> None:
    host = controller(settings=EngineSettings(quanta=(2.0, 4.0, 4.0, 4.0)))
    for name in ("a", "b"):
        host.open(name, GB)
        host.submit(name, 10_000.0)
    host.run_until(600.0)
    assert abs(host.served("a") - host.served("b")) <= 8.0
    assert host.served("a") + host.served("b") > 590.0


def test_service_follows_weights() -> None:
    settings = EngineSettings(
        quanta=(2.0, 4.0, 4.0, 4.0), user_weights={("default", "a"): 3.0}, throttle=5.0
    )
    host = controller(settings=settings)
    for name in ("a", "b"):
        host.open(name, GB, tier=Tier.BASIC)
        host.submit(name, 100_000.0)
    host.run_until(2000.0)
    assert host.served("a") / host.served("b") == pytest.approx(3.0, rel=0.05)


def test_many_sessions_of_one_user_gain_nothing() -> None:
    host = controller(settings=EngineSettings(quanta=(2.0, 4.0, 4.0, 4.0)))
    host.open("honest", GB)
    host.submit("honest", 100_000.0)
    for index in range(4):
        host.open(f"greedy{index}", GB, user="greedy")
        host.submit(f"greedy{index}", 100_000.0)
    host.run_until(2000.0)
    assert host.served("honest") == pytest.approx(1000.0, rel=0.05)


def test_cutting_work_into_short_cells_gains_nothing() -> None:
    host = controller(settings=EngineSettings(quanta=(2.0, 10.0, 20.0, 20.0)))
    host.finished = lambda name: host.submit(name, 1.0)
    host.open("honest", GB)
    host.submit("honest", 100_000.0)
    host.open("cutter", GB)
    host.submit("cutter", 1.0)
    host.run_until(4000.0)
    assert host.served("honest") > 1800.0


def test_charges_are_conserved() -> None:
    host = controller(2, memory=10 * GB)
    held = 0.0
    for index in range(5):
        host.open(f"s{index}", 8 * GB, user=f"u{index % 2}")
        host.submit(f"s{index}", 50.0)
    host.run_until(1000.0)
    begun: dict[str, float] = {}
    for at, event in host.log:
        if isinstance(event, events.Started):
            begun[event.session] = at
        elif isinstance(event, (events.Released, events.CellFinished)):
            held += at - begun.pop(event.session)
    served = host.engine.statistics().served
    assert held == pytest.approx(250.0)
    # Besides execution only switches are charged: 0.4 s each, and the evictions for them.
    switches = host.engine.statistics().switches
    assert held <= sum(served.values()) <= held + switches * 0.9


def test_premium_precedes_basic_at_once() -> None:
    host = controller()
    host.open("basic", GB, tier=Tier.BASIC)
    host.submit("basic", 1000.0)
    host.run_until(1.0)
    host.run_until(1.5)
    host.open("premium", GB, tier=Tier.PREMIUM)
    host.submit("premium", 500.0)
    host.run_until(300.0)
    assert wait_of(host, "premium") < 0.2
    assert host.served("premium") > 0.94 * (300.0 - 1.5)


def test_basic_is_stopped_before_standard() -> None:
    host = controller(2)
    host.open("basic", GB, tier=Tier.BASIC)
    host.open("standard", GB)
    host.submit("basic", 1000.0)
    host.submit("standard", 1000.0)
    host.run_until(300.0)
    host.open("short", GB)
    host.submit("short", 1.0)
    host.run_until(302.0)
    stopped = [d.session for _, d in host.decided if isinstance(d, Preempt)]
    assert stopped == ["basic"]


def test_memory_that_fits_stays() -> None:
    host = controller()
    for index in range(3):
        host.open(f"s{index}", 7 * GB)
    for _ in range(4):
        for index in range(3):
            host.submit(f"s{index}", 1.0)
            host.run_until(host.now + 10.0)
    assert host.engine.statistics().switches == 3
    assert not any(isinstance(d, Evict) for _, d in host.decided)


def test_memory_twice_the_device_makes_progress() -> None:
    host = controller(memory=16 * GB)
    for index in range(8):
        host.open(f"s{index}", 4 * GB)
        host.submit(f"s{index}", 100.0)
    host.run_until(2000.0)
    assert all(host.served(f"s{index}") == pytest.approx(100.0) for index in range(8))


def test_pinned_memory_stays() -> None:
    host = controller(memory=10 * GB)
    host.open("pinned", 6 * GB, pinned=True)
    host.submit("pinned", 1.0)
    host.run_until(5.0)
    host.open("other", 6 * GB)
    host.submit("other", 1.0)
    host.run_until(50.0)
    assert grants(host, "other") == []
    host.tell(events.TermsChanged(host.now, "pinned", Tier.STANDARD, 1.0, False, False))
    host.run_until(60.0)
    assert len(grants(host, "other")) == 1


def test_evicted_sessions_are_spilled_when_the_host_is_full() -> None:
    host = controller(memory=10 * GB, settings=EngineSettings(host_memory=9 * GB))
    for index in range(3):
        host.open(f"s{index}", 8 * GB)
        host.submit(f"s{index}", 1.0)
        host.run_until(host.now + 10.0)
    assert [d.to for _, d in host.decided if isinstance(d, Evict)] == ["host", "disk"]


def test_an_idle_neighbour_moves_to_where_there_is_room() -> None:
    host = controller(2, memory=10 * GB)
    host.open("a", 4 * GB, device="node0/gpu0")
    host.open("b", 4 * GB, device="node0/gpu1")
    host.open("big", 9 * GB)
    host.submit("big", 1.0)
    host.run_until(20.0)
    assert any(isinstance(d, MigrateMemory) for _, d in host.decided)
    assert not any(isinstance(d, Evict) for _, d in host.decided)


def test_several_devices_come_all_at_once_and_on_one_node() -> None:
    host = controller(8, per_node=4)
    host.open("single", GB)
    host.submit("single", 1000.0)
    host.run_until(1.0)
    host.open("gang", GB, gpus=4)
    host.submit("gang", 10.0)
    host.run_until(5.0)
    (grant,) = grants(host, "gang")
    assert len({device.split("/")[0] for device in grant.devices}) == 1
    assert len(set(grant.devices)) == 4


def test_several_devices_are_taken_from_long_cells() -> None:
    host = controller(4, per_node=4)
    for index in range(4):
        host.open(f"s{index}", GB)
        host.submit(f"s{index}", 5000.0)
    host.run_until(200.0)
    host.open("gang", GB, gpus=4)
    host.submit("gang", 10.0)
    host.run_until(250.0)
    assert wait_of(host, "gang") < 2.0
    assert host.served("gang") == pytest.approx(10.0)


def test_stale_tokens_and_unknown_sessions_change_nothing() -> None:
    host = controller()
    host.open("a", GB)
    host.submit("a", 100.0)
    host.run_until(5.0)
    token = grants(host, "a")[0].token
    for event in (
        events.Released(5.0, "a", token - 1),
        events.Started(5.0, "a", token + 7),
        events.GrantRefused(5.0, "a", token + 1, "late"),
        events.CellFinished(5.0, "nobody"),
        events.SessionRemoved(5.0, "nobody"),
        events.Evicted(5.0, "a", "node0/gpu0"),
        events.Stayed(5.0, "a", "node0/gpu0", "nobody asked"),
        events.Moved(5.0, "nobody", "node0/gpu0"),
        events.WorkerDied(5.0, "nobody"),
        events.Measured(5.0, "nobody", 1, 1.0),
        events.DeviceFailed(5.0, "nowhere"),
    ):
        assert host.engine.handle(event) == []
    host.run_until(200.0)
    assert host.served("a") == pytest.approx(100.0)


def test_removing_a_session_is_idempotent() -> None:
    host = controller()
    host.open("a", GB)
    host.tell(events.SessionRemoved(0.0, "a"))
    assert host.tell(events.SessionRemoved(0.0, "a")) == []


def test_a_waiting_cell_can_be_given_up() -> None:
    host = controller()
    for name in ("a", "b"):
        host.open(name, GB)
        host.submit(name, 1.0)
    assert any(isinstance(d, Queued) for _, d in host.decided)
    host.tell(events.CellFinished(0.0, "b"))
    host.run_until(50.0)
    assert grants(host, "b") == []


def test_memory_that_left_unasked_is_loaded_again() -> None:
    host = controller()
    host.open("a", 8 * GB)
    host.submit("a", 1.0)
    host.run_until(5.0)
    host.notebooks["a"].homes.clear()
    host.resident["node0/gpu0"].clear()
    host.tell(events.Evicted(host.now, "a", "node0/gpu0"))
    host.submit("a", 1.0)
    host.run_until(10.0)
    assert host.engine.statistics().switches == 2


def test_a_session_that_moved_unasked_stays_there() -> None:
    host = controller(2)
    host.open("a", 8 * GB)
    host.submit("a", 1.0)
    host.run_until(5.0)
    (first,) = grants(host, "a")
    target = next(name for name in host.devices if name not in first.devices)
    host.notebooks["a"].homes = {target}
    host.tell(events.Moved(host.now, "a", target))
    host.submit("a", 1.0)
    host.run_until(10.0)
    assert grants(host, "a")[-1].devices == (target,)
    assert host.engine.statistics().switches == 1


def test_a_dead_worker_gets_its_device_back() -> None:
    host = controller()
    host.open("a", GB)
    host.submit("a", 100.0)
    host.run_until(5.0)
    host.lose("a")
    host.tell(events.WorkerDied(host.now, "a"))
    host.run_until(200.0)
    assert host.served("a") == pytest.approx(100.0)


def test_a_failed_device_is_avoided_until_it_is_healed() -> None:
    host = controller(2)
    host.open("a", GB)
    host.submit("a", 100.0)
    host.run_until(5.0)
    (first,) = grants(host, "a")[0].devices
    host.lose("a")
    host.tell(events.DeviceFailed(host.now, first))
    host.run_until(10.0)
    assert grants(host, "a")[-1].devices != (first,)
    host.tell(events.DeviceHealed(host.now, first))
    host.open("b", GB)
    host.submit("b", 1.0)
    host.run_until(50.0)
    assert grants(host, "b")[-1].devices == (first,)


def test_a_session_keeps_its_device_when_the_one_it_comes_from_fails() -> None:
    host = controller(2)
    for session in "ab":
        host.open(session, GB, device="node0/gpu0", resident=True)
    host.engine.handle(events.CellSubmitted(0.0, "a"))
    (grant,) = host.engine.handle(events.CellSubmitted(0.0, "b"))
    assert isinstance(grant, Grant)
    assert grant.devices == ("node0/gpu1",)
    host.engine.handle(events.DeviceFailed(0.0, "node0/gpu0"))
    assert host.engine.held()["b"] == ("node0/gpu1", grant.token)


def test_a_grant_that_failed_is_tried_again() -> None:
    host = controller()
    host.open("a", GB)
    host.notebooks["a"].left = 1.0
    (grant,) = host.engine.handle(events.CellSubmitted(0.0, "a"))
    assert isinstance(grant, Grant)
    failed = events.GrantRefused(0.1, "a", grant.token, "no process")
    (queued,) = host.engine.handle(failed)
    assert isinstance(queued, Queued)
    tick = host.engine.next_tick()
    assert tick == pytest.approx(1.1)
    (again,) = host.engine.handle(events.Tick(1.1))
    assert isinstance(again, Grant)
    assert again.token > grant.token


def test_measured_bandwidth_changes_what_a_switch_costs() -> None:
    host = controller(settings=EngineSettings(quanta=(2.0, 10.0, 60.0, 60.0)))
    host.open("a", 8 * GB)
    host.tell(events.BandwidthMeasured(0.0, "node0/gpu0", 1e9, 2.0))
    host.submit("a", 1.0)
    host.run_until(1.0)
    (device,) = host.engine.devices()
    assert (device.bytes_per_second, device.constant_seconds) == (1e9, 2.0)


def test_reconfiguration_keeps_running_cells() -> None:
    host = controller()
    host.open("a", GB)
    host.open("b", GB)
    host.submit("a", 100.0)
    host.submit("b", 100.0)
    host.run_until(5.0)
    running = list(host.holders["node0/gpu0"])
    decided = host.tell(
        events.Reconfigured(5.0, EngineSettings(user_weights={("default", "a"): 5.0}))
    )
    assert decided == []
    assert host.holders["node0/gpu0"] == running


def test_a_holder_is_contended_while_a_session_waits() -> None:
    host = controller()
    host.open("a", GB)
    host.submit("a", 100.0)
    assert not host.engine.contended("a")
    host.open("b", GB)
    host.submit("b", 100.0)
    assert host.engine.contended("a")


def test_non_preemptible_sessions_run_to_the_end_of_their_cell() -> None:
    host = controller()
    host.open("rigid", GB, may_preempt=False)
    host.submit("rigid", 100.0)
    host.run_until(50.0)
    host.open("short", GB)
    host.submit("short", 1.0)
    host.run_until(120.0)
    assert not any(isinstance(d, Preempt) for _, d in host.decided)
    assert wait_of(host, "short") > 49.0


@pytest.mark.parametrize(
    ("step", "attained", "within"), [(0.04, 0.0, 0.04), (0.5, 0.0, 0.0), (0.5, 20.0, 0.5)]
)
def test_only_long_cells_wait_for_the_nadir(step: float, attained: float, within: float) -> None:
    host = controller(settings=EngineSettings(quanta=(2.0, 10.0, 60.0, 60.0)))
    host.open("victim", GB)
    host.open("next", GB)
    if attained:
        host.submit("next", 1000.0)
        host.run_until(attained)
    host.submit("victim", 1000.0)
    host.tell(events.Measured(host.now, "victim", GB, 0.0, step, 0.25))
    if not attained:
        host.run_until(100.0)
        host.submit("next", 1.0)
    host.run_until(host.now + 400.0)
    stops = [d for _, d in host.decided if isinstance(d, Preempt) and d.session == "victim"]
    assert stops[0].at_nadir_within == within


def test_an_eviction_that_failed_is_not_tried_again_at_once() -> None:
    host = controller(memory=10 * GB)
    host.open("stuck", 8 * GB)
    host.submit("stuck", 1.0)
    host.run_until(5.0)
    host.open("new", 8 * GB)
    (evict,) = (
        d for d in host.engine.handle(events.CellSubmitted(5.0, "new")) if isinstance(d, Evict)
    )
    failed = events.Stayed(5.0, "stuck", evict.device, "no memory on the host")
    assert not any(isinstance(d, Evict) for d in host.engine.handle(failed))
    tick = host.engine.next_tick()
    assert tick is not None
    assert tick <= 6.0
    again = [d for at in (5.5, 6.0) for d in host.engine.handle(events.Tick(at))]
    assert [type(d) for d in again] == [Evict]


def test_a_session_on_two_devices_moves_only_when_both_are_left() -> None:
    host = controller(2, memory=10 * GB)
    host.open("gang", 8 * GB, gpus=2)
    host.submit("gang", 1.0)
    host.run_until(5.0)
    for name in ("a", "b"):
        host.open(name, 8 * GB)
        host.engine.handle(events.CellSubmitted(5.0, name))
    host.engine.handle(events.CellSubmitted(5.0, "gang"))
    first = host.engine.handle(events.Evicted(5.1, "gang", "node0/gpu0"))
    second = host.engine.handle(events.Evicted(5.2, "gang", "node0/gpu1"))
    granted = [d.session for d in (*first, *second) if isinstance(d, Grant)]
    assert sorted(granted) == ["a", "b"]


@pytest.mark.parametrize(("waiting", "words"), [(1, "1 session waits"), (2, "2 sessions wait")])
def test_reasons_are_readable_clauses(waiting: int, words: str) -> None:
    host = controller()
    for index in range(waiting + 1):
        host.open(f"s{index}", GB)
        host.submit(f"s{index}", 1.0)
    queued = [d for _, d in host.decided if isinstance(d, Queued)]
    assert queued[-1].reason == f"{words} for 1 device"


def test_a_pinned_session_waits_for_its_device() -> None:
    host = controller(2)
    host.open("pinned", GB)
    host.submit("pinned", 1.0)
    host.run_until(5.0)
    (home,) = grants(host, "pinned")[0].devices
    host.tell(events.TermsChanged(host.now, "pinned", Tier.STANDARD, 1.0, True, False))
    host.lose("pinned")
    host.tell(events.WorkerDied(host.now, "pinned"))  # other sessions may use its memory
    host.open("other", GB, may_preempt=False, bound=home)
    host.submit("other", 50.0)
    host.run_until(10.0)
    host.submit("pinned", 1.0)
    host.run_until(50.0)
    assert len(grants(host, "pinned")) == 1
    host.run_until(70.0)
    assert grants(host, "pinned")[-1].devices == (home,)
    host.tell(events.TermsChanged(host.now, "pinned", Tier.STANDARD, 1.0, False, False))
    host.lose("pinned")
    host.tell(events.WorkerDied(host.now, "pinned"))
    host.submit("other", 50.0)
    host.run_until(75.0)
    host.submit("pinned", 1.0)
    host.run_until(80.0)
    assert grants(host, "pinned")[-1].devices != (home,)


def test_a_session_is_pinned_where_it_says_it_is() -> None:
    host = controller(2)
    host.open("pinned", GB)
    change = events.TermsChanged(
        host.now, "pinned", Tier.STANDARD, 1.0, True, False, device="node0/gpu1"
    )
    host.tell(change)
    host.submit("pinned", 1.0)
    host.run_until(5.0)
    assert grants(host, "pinned")[-1].devices == ("node0/gpu1",)


def test_leases_are_reported() -> None:
    host = controller(2)
    for name in ("a", "b", "c"):
        host.open(name, GB)
        host.submit(name, 100.0)
    host.run_until(1.0)
    held = host.engine.held()
    assert held == {
        name: (host.notebooks[name].devices[0], host.notebooks[name].token)
        for name in host.notebooks
        if host.notebooks[name].devices
    }
    assert len(held) == 2
    for name in ("a", "b", "c"):
        if host.notebooks[name].devices:
            host.halt(name)
        host.tell(events.CellFinished(host.now, name))
    assert host.engine.held() == {}


def test_a_bound_session_waits_for_its_device() -> None:
    host = controller(2)
    host.open("rigid", GB, may_preempt=False, device="node0/gpu0")
    host.submit("rigid", 50.0)
    host.run_until(1.0)
    host.open("bound", GB, bound="node0/gpu0")
    host.open("free", GB)
    host.submit("bound", 1.0)
    host.submit("free", 1.0)
    host.run_until(10.0)
    assert wait_of(host, "free") < 1.0
    assert grants(host, "bound") == []
    host.run_until(100.0)
    assert grants(host, "bound")[0].devices == ("node0/gpu0",)
    host.notebooks["bound"].homes = {"node0/gpu1"}
    host.tell(events.Moved(host.now, "bound", "node0/gpu1"))
    host.submit("bound", 1.0)
    host.run_until(110.0)
    assert grants(host, "bound")[-1].devices == ("node0/gpu1",)


def test_a_basic_session_does_not_starve() -> None:
    host = controller(settings=EngineSettings(quanta=(1.0, 2.0, 3.0, 4.0)))
    host.finished = lambda name: host.submit(name, 0.5) if name != "basic" else None
    host.open("basic", GB, tier=Tier.BASIC)
    for index in range(4):
        host.open(f"premium{index}", GB, tier=Tier.PREMIUM, user="busy")
        host.submit(f"premium{index}", 0.5)
    host.submit("basic", 3.0)
    host.run_until(200.0)
    assert host.served("basic") == pytest.approx(3.0)


def test_a_session_refused_by_a_device_is_served_by_another() -> None:
    """The pause doubles from one attempt to the next, and the first device is not tried in it."""
    engine = controller(2).engine
    engine.handle(events.SessionAdded(0.0, "a", "default", "a", device="node0/gpu0", memory=GB))
    now, tried = 0.0, list[tuple[float, str]]()
    decisions = engine.handle(events.CellSubmitted(now, "a"))
    while len(tried) < 8:
        for grant in (each for each in decisions if isinstance(each, Grant)):
            (device,) = grant.devices
            tried.append((now, device))
            refused = events.GrantRefused(now, "a", grant.token, "no room")
            decisions = engine.handle(refused)
            break
        else:
            now = engine.next_tick() or 0.0
            decisions = engine.handle(events.Tick(now))
    assert {device for _, device in tried[:2]} == {"node0/gpu0", "node0/gpu1"}
    assert [at for at, _ in tried] == pytest.approx([0, 0, 1, 1, 3, 3, 7, 7])


def test_a_refused_session_is_where_it_was() -> None:
    """Not on the device that could not be granted, but where its memory was before."""
    host = controller(2)
    host.open("a", GB, device="node0/gpu0")
    host.open("long", GB, bound="node0/gpu0")
    host.submit("long", 100.0)
    host.run_until(0.1)
    home, other = host.engine._leases.table.devices.values()
    (grant,) = host.engine.handle(events.CellSubmitted(0.1, "a"))
    assert isinstance(grant, Grant)
    assert grant.devices == (other.id,)
    host.engine.handle(events.GrantRefused(0.1, "a", grant.token, "no room"))
    host.engine.handle(events.CellFinished(0.2, "a"))
    assert {each.id for each in home.residents} == {"a", "long"}
    assert not other.residents
    assert other.is_free


@pytest.mark.parametrize("answer", ["stays", "moves", "died", "closed"])
def test_a_migration_is_answered_and_its_waiters_continue(answer: str) -> None:
    """A regression: two sessions were stopped forever by one that stayed."""
    host = controller(2, memory=10 * GB)
    host.open("idle", 6 * GB, device="node0/gpu0")
    host.open("new", 6 * GB, bound="node0/gpu0")
    host.notebooks["new"].left = 1.0
    (move,) = host.engine.handle(events.CellSubmitted(5.0, "new"))
    assert isinstance(move, MigrateMemory)
    answers: dict[str, events.Event] = {
        "stays": events.Stayed(6.0, "idle", "node0/gpu0", "no room"),
        "moves": events.Moved(6.0, "idle", "node0/gpu1"),
        "died": events.WorkerDied(6.0, "idle"),
        "closed": events.SessionRemoved(6.0, "idle"),
    }
    decided = [*host.engine.handle(answers[answer]), *host.engine.handle(events.Tick(8.0))]
    if answer == "stays":
        (again,) = decided  # it was migrated recently
        assert isinstance(again, Evict)
        decided = host.engine.handle(events.Evicted(9.0, "idle", "node0/gpu0"))
    assert [type(each) for each in decided] == [Grant]
    (grant,) = decided
    assert isinstance(grant, Grant)
    host.engine.handle(events.Started(9.0, "new", grant.token))
    host.engine.handle(events.CellFinished(9.5, "new"))
    left, right = host.engine._leases.table.devices.values()
    assert [left.incoming, left.lessees, right.incoming, right.lessees] == [None, [], None, []]
    assert [each.id for each in right.residents] == (["idle"] if answer == "moves" else [])
