"""Changes by an administrator while cells run: tiers, holds, virtual clusters, guarantees."""

from __future__ import annotations

import math

import pytest

from jupyter_sing.controller.controller import COPY_RATE, LIVE, SWITCH_SECONDS
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Grant, Preempt, Queued
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.leases import HivedGuarantees
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, QuotaLimits, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9


def machine(count: int, found: EngineSettings | None = None, per_node: int = 8) -> FakeController:
    devices = [
        DeviceSpec(f"node{index // per_node}/gpu{index}", 24 * GB, f"node{index // per_node}")
        for index in range(count)
    ]
    return FakeController(Engine(devices, found), devices, delay=0.01)


def begin(host: FakeController, name: str, seconds: float, **terms: object) -> None:
    terms = {"memory": GB, **terms}
    host.open(name, **terms)  # type: ignore[arg-type]
    host.submit(name, seconds)


def stopped(host: FakeController) -> list[str]:
    return [d.session for _, d in host.decided if isinstance(d, Preempt)]


def promised(host: FakeController, **devices: int) -> HivedGuarantees:
    return HivedGuarantees(Configuration.of_nodes({"node0": list(host.devices)}, devices))


def change(host: FakeController, name: str, **changes: object) -> None:
    terms: dict[str, object] = {
        "tier": Tier.STANDARD, "weight": 1.0, "pinned": False, "may_pack": False, **changes,
    }  # fmt: skip
    host.tell(events.TermsChanged(host.now, name, **terms))  # type: ignore[arg-type]


class TestPremium:
    """Effects of a premium cell on a basic one that has just begun, with the daemon's settings."""

    def begun(self, tier: Tier, *, memory: int = 0, ago: float = 0.01) -> tuple[Engine, float]:
        device = DeviceSpec(
            "cpu:0", 4 * GB, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS
        )
        engine = Engine([device], LIVE)
        home = "cpu:0" if memory else None
        engine.handle(
            events.SessionAdded(0.0, "a", "default", "a", tier, memory=memory, device=home)
        )
        (grant,) = engine.handle(events.CellSubmitted(0.0, "a"))
        assert isinstance(grant, Grant)
        engine.handle(events.Started(0.005, "a", grant.token))
        return engine, 0.005 + ago

    def comes(self, engine: Engine, tier: Tier, now: float) -> list[str]:
        engine.handle(events.SessionAdded(now, "b", "default", "b", tier))
        return [type(d).__name__ for d in engine.handle(events.CellSubmitted(now, "b"))]

    @pytest.mark.parametrize("memory", [0, GB])
    def test_a_premium_cell_precedes_a_basic_one_at_once(self, memory: int) -> None:
        engine, now = self.begun(Tier.BASIC, memory=memory)
        assert self.comes(engine, Tier.PREMIUM, now) == ["Preempt"]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (Tier.BASIC, Tier.BASIC),
            (Tier.BASIC, Tier.STANDARD),
            (Tier.STANDARD, Tier.STANDARD),
            (Tier.STANDARD, Tier.PREMIUM),
            (Tier.PREMIUM, Tier.PREMIUM),
            (Tier.PREMIUM, Tier.BASIC),
        ],
    )
    def test_between_all_others_the_minimum_run_is_left(self, first: Tier, second: Tier) -> None:
        engine, now = self.begun(first)
        assert self.comes(engine, second, now) == ["Queued"]
        assert self.begun(first)[0].next_tick() == pytest.approx(0.005 + LIVE.run_min)

    def test_the_switch_that_a_basic_lease_has_cost_protects_it(self) -> None:
        host = machine(1)
        begin(host, "basic", 100.0, memory=20 * GB, tier=Tier.BASIC)
        host.run_until(1.2)  # of which loading took one second
        begin(host, "premium", 1.0, tier=Tier.PREMIUM)
        assert stopped(host) == []
        host.run_until(10.0)
        at = next(at for at, d in host.decided if isinstance(d, Preempt))
        assert at == pytest.approx(1.0 + 2.0)

    def test_premium_cells_one_after_the_other_leave_basic_ones_alive(self) -> None:
        host = machine(1, LIVE)
        host.finished = lambda name: host.submit(name, 0.3) if name != "basic" else None
        for index in range(4):
            begin(host, f"premium{index}", 0.3, tier=Tier.PREMIUM, user="busy")
        begin(host, "basic", 5.0, tier=Tier.BASIC)
        host.run_until(300.0)
        assert host.served("basic") == pytest.approx(5.0)

    def test_a_long_waiter_keeps_the_minimum_run(self) -> None:
        host = machine(1, LIVE)
        begin(host, "rigid", 60.0, may_preempt=False)
        begin(host, "basic", 100.0, memory=0, tier=Tier.BASIC)
        host.run_until(60.3)
        assert host.executing("node0/gpu0") == ["basic"]
        begin(host, "premium", 1.0, tier=Tier.PREMIUM)
        host.run_until(70.0)
        at = next(at for at, d in host.decided if isinstance(d, Preempt))
        begun = next(
            at for at, e in host.log if isinstance(e, events.Started) and e.session == "basic"
        )
        assert at == pytest.approx(begun + LIVE.run_min)

    def test_a_second_premium_session_precedes_a_basic_one_as_well(self) -> None:
        host = machine(1, LIVE)
        begin(host, "one", 0.1, tier=Tier.PREMIUM)
        host.run_until(5.0)
        begin(host, "basic", 100.0, tier=Tier.BASIC)
        host.run_until(5.3)
        assert not host.engine.admission("one").reason.startswith("best")
        begin(host, "two", 1.0, tier=Tier.PREMIUM)
        assert stopped(host) == ["basic"]


class TestHold:
    def test_after_its_time_a_lease_is_whoevers_waits(self) -> None:
        found = EngineSettings(max_hold={Tier.STANDARD: 30.0})
        host = machine(1, found)
        begin(host, "first", 1000.0)
        host.run_until(20.0)
        begin(host, "second", 1000.0)
        host.run_until(2000.0)
        assert host.served("first") + host.served("second") > 1990.0
        begins = {d.token: at for at, d in host.decided if isinstance(d, Grant)}
        for at, d in host.decided:
            if isinstance(d, Preempt):
                assert at - begins[d.token] <= 30.0 + 1e-6

    def test_without_others_it_continues(self) -> None:
        host = machine(1, EngineSettings(max_hold={Tier.STANDARD: 5.0}))
        begin(host, "alone", 100.0)
        host.run_until(200.0)
        assert stopped(host) == []

    def test_even_a_longer_cell_of_a_lower_tier_runs_first_then(self) -> None:
        host = machine(1, EngineSettings(max_hold={Tier.PREMIUM: 20.0}))
        begin(host, "basic", 1000.0, tier=Tier.BASIC)
        host.run_until(500.0)
        begin(host, "premium", 100.0, tier=Tier.PREMIUM)
        host.run_until(540.0)
        assert "premium" in stopped(host)

    def test_a_new_longest_hold_applies_to_current_leases(self) -> None:
        host = machine(1)
        begin(host, "first", 1000.0, tier=Tier.BASIC)
        host.run_until(80.0)
        begin(host, "second", 1000.0, tier=Tier.BASIC)
        host.run_until(81.0)
        before = len(stopped(host))
        host.tell(events.Reconfigured(81.0, EngineSettings(max_hold={Tier.BASIC: 10.0})))
        host.run_until(200.0)
        assert len(stopped(host)) - before >= 8


def test_targets_are_those_of_the_settings() -> None:
    host = machine(1, EngineSettings(targets={Tier.PREMIUM: 0.5, Tier.BASIC: 0.0}))
    host.open("premium", GB, tier=Tier.PREMIUM)
    host.open("standard", GB)
    assert host.engine.admission("premium").reason == "premium: 50% of what it asks for, hourly"
    assert host.engine.admission("standard").reason.startswith("standard: runs when there is room")
    host.tell(events.Reconfigured(0.0, EngineSettings()))
    assert host.engine.admission("standard").reason == "standard: 70% of what it asks for, hourly"


class TestVirtualClusters:
    def test_a_running_session_keeps_its_lease_and_is_charged_where_it_is_now(self) -> None:
        host = machine(1)
        begin(host, "s", 100.0, vc="physics", user="ann")
        host.run_until(20.0)
        change(host, "s", vc="biology")
        host.run_until(150.0)
        assert stopped(host) == []
        assert host.served("s") == pytest.approx(100.0)
        served = host.engine.statistics().served
        assert served["physics", "ann"] == pytest.approx(20.0, abs=0.1)
        assert served["biology", "ann"] == pytest.approx(80.0, abs=0.1)

    def test_a_waiting_session_keeps_its_place(self) -> None:
        host = machine(1)
        begin(host, "rigid", 100.0, may_preempt=False)
        begin(host, "s", 5.0, vc="physics", user="ann")
        change(host, "s", vc="biology", user="bob")
        host.run_until(150.0)
        assert host.served("s") == 5.0
        assert host.engine.statistics().served["biology", "bob"] >= 5.0

    def test_its_lead_comes_along(self) -> None:
        host = machine(1)
        begin(host, "one", 1e5, vc="physics", user="ann", may_preempt=False)
        begin(host, "two", 1e5, vc="physics", user="ann")
        host.run_until(300.0)
        for name in ("two", "one"):
            change(host, name, vc="biology")
        tags = [host.engine.tags(name, 300.0)[2] for name in ("one", "two")]
        assert tags[0] - tags[1] == pytest.approx(300.0)

    def test_a_users_device_time_of_the_day_comes_along(self) -> None:
        limits = {
            (vc, "ann"): QuotaLimits(gpu_seconds_per_day=50.0) for vc in ("physics", "biology")
        }
        host = machine(1, EngineSettings(quanta=(2.0, 4.0, 4.0, 4.0), user_limits=limits))
        begin(host, "s", 200.0, vc="physics", user="ann")
        host.run_until(100.0)
        change(host, "s", vc="biology")
        host.run_until(500.0)
        assert host.served("s") < 60.0

    def test_limits_count_it_where_it_is_now(self) -> None:
        found = EngineSettings(
            quanta=(2.0, 4.0, 4.0, 4.0),
            vc_limits={"biology": QuotaLimits(devices=1, device_memory=4 * GB)},
        )
        host = machine(2, found)
        begin(host, "b", 1000.0, vc="biology", memory=3 * GB)
        begin(host, "s", 1000.0, vc="physics", memory=GB)
        host.run_until(10.0)
        change(host, "s", vc="biology")
        assert stopped(host) == []
        begin(host, "c", 1.0, vc="biology")
        assert isinstance(host.decided[-1][1], Queued)
        assert "virtual cluster biology has 2 of 1 device" in host.decided[-1][1].reason

    def test_its_guarantee_changes_at_the_next_grant(self) -> None:
        host = machine(2)
        host.tell(events.Reconfigured(0.0, EngineSettings(), promised(host, physics=1, biology=1)))
        begin(host, "s", 1000.0, vc="physics", tier=Tier.BASIC)
        begin(host, "t", 1000.0, vc="biology", tier=Tier.BASIC)
        host.run_until(10.0)
        change(host, "s", vc="biology", tier=Tier.BASIC)
        begin(host, "new", 10.0, vc="physics", tier=Tier.BASIC)
        host.run_until(900.0)
        assert host.served("new") == pytest.approx(10.0)
        assert host.served("t") > 0.0


class TestGuarantees:
    def test_running_cells_keep_their_devices_when_guarantees_come(self) -> None:
        host = machine(4)
        for index in range(4):
            begin(host, f"s{index}", 500.0, vc="biology" if index else "physics")
        host.run_until(20.0)
        before = {device: list(held) for device, held in host.holders.items()}
        decided = host.tell(
            events.Reconfigured(20.0, EngineSettings(), promised(host, physics=2, biology=2))
        )
        assert decided == []
        assert host.holders == before
        begin(host, "claims", 5.0, vc="physics", user="zoe")
        host.run_until(23.0)
        assert len(stopped(host)) == 1  # one that only borrows a device by now
        host.run_until(3000.0)
        assert all(host.served(f"s{index}") == pytest.approx(500.0) for index in range(4))

    def test_other_guarantees_and_none_again(self) -> None:
        host = machine(4)
        for names in ({"physics": 3}, {"biology": 4}, {"physics": 1, "biology": 1}, None):
            for index, vc in enumerate(("physics", "biology", "guests")):
                name = f"{vc}{host.now}"
                begin(host, name, 30.0 + index, vc=vc)
            host.run_until(host.now + 10.0)
            running = {device: list(held) for device, held in host.holders.items()}
            given = promised(host, **names) if names else NoGuarantees(list(host.devices))
            host.tell(events.Reconfigured(host.now, EngineSettings(), given))
            for device, held in running.items():
                assert set(held) <= set(host.holders[device])
        host.run_until(1000.0)
        assert all(
            notebook.left == 0.0 or notebook.had > 29.0 for notebook in host.notebooks.values()
        )
        assert not any(host.holders.values())

    def test_a_reservation_is_made_anew(self) -> None:
        host = machine(1)
        host.delay = 1.0
        begin(host, "long", 1000.0)
        host.run_until(50.0)
        begin(host, "short", 1.0)
        assert stopped(host) == ["long"]
        host.tell(events.Reconfigured(host.now, EngineSettings(), promised(host, default=1)))
        host.run_until(60.0)
        assert host.served("short") == 1.0


class TestWide:
    def test_more_devices_than_any_node_has_are_refused_in_words(self) -> None:
        host = machine(8, per_node=4)
        begin(host, "wide", 10.0, gpus=8)
        begin(host, "other", 10.0)
        host.run_until(100.0)
        (said,) = [d for _, d in host.decided if isinstance(d, Queued)]
        assert said.session == "wide"
        explained = host.engine.explain("wide", host.now)
        assert explained is not None
        assert explained.expected_wait == math.inf
        assert said.reason == "It needs 8 devices at once, and 4 devices is the most there can be"
        assert host.served("other") == 10.0
        host.tell(events.CellFinished(100.0, "wide"))
        assert host.engine.explain("wide", 100.0) is None

    def test_cells_may_be_narrower_than_nodes(self) -> None:
        host = machine(8)
        part = list(host.devices)[:2]
        few = HivedGuarantees(Configuration.of_nodes({"node0": part}, {"physics": 1}))
        host.tell(events.Reconfigured(0.0, EngineSettings(), few))
        begin(host, "wide", 10.0, gpus=4)
        explained = host.engine.explain("wide", 0.0)
        assert explained is not None
        assert "2 devices is the most" in explained.reason
        outside = list(host.devices)[7]
        assert host.tell(events.DeviceFailed(0.0, outside)) == []
        assert host.tell(events.DeviceHealed(0.0, outside)) == []
        host.tell(events.Reconfigured(0.0, EngineSettings(), NoGuarantees(list(host.devices))))
        host.run_until(30.0)
        assert host.served("wide") == 10.0


class TestExplain:
    def test_places_are_in_the_order_of_service(self) -> None:
        host = machine(1)
        begin(host, "rigid", 5.0, may_preempt=False)
        for name in ("c", "a", "b"):
            begin(host, name, 1.0, tier=Tier.BASIC)
        begin(host, "p", 1.0, tier=Tier.PREMIUM)
        places = {}
        for name in ("a", "b", "c", "p"):
            explained = host.engine.explain(name, host.now)
            assert explained is not None
            places[name] = explained.position
        host.run_until(100.0)
        order = [d.session for _, d in host.decided if isinstance(d, Grant)][1:]
        assert order == sorted(places, key=places.__getitem__)
        assert sorted(places.values()) == [1, 2, 3, 4]

    def test_sessions_that_do_not_wait_have_no_reason(self) -> None:
        host = machine(1)
        assert host.engine.explain("nobody", 0.0) is None
        host.open("a", GB)
        assert host.engine.explain("a", 0.0) is None
        host.submit("a", 10.0)
        host.run_until(5.0)
        assert host.engine.explain("a", 5.0) is None

    def test_a_reservation_is_explained(self) -> None:
        host = machine(1)
        host.delay = 1.0
        begin(host, "long", 1000.0)
        host.run_until(50.0)
        begin(host, "short", 1.0)
        explained = host.engine.explain("short", host.now)
        assert explained is not None
        assert explained.reason == "long stops first"

    def test_many_waiters_are_not_compared_one_by_one(self) -> None:
        host = machine(1)
        begin(host, "rigid", 50.0, may_preempt=False)
        for index in range(200):
            begin(host, f"s{index}", 1.0)
        explained = host.engine.explain("s7", host.now)
        assert explained is not None
        assert 1 <= explained.position <= 200
        assert explained.reason == "200 sessions wait for 1 device"
