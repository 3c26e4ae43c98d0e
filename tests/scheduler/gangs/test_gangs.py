"""Gangs: the ranks of a job, on a number of devices that changes while it executes."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Grant, Preempt, PrepareResize
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.gangs.growth import PREPARE_BYTES_PER_SECOND, PREPARE_SECONDS
from jupyter_sing.scheduler.gangs.ranks import per_device, seat_of, sizes
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.leases import HivedGuarantees
from jupyter_sing.scheduler.policy import parse
from jupyter_sing.scheduler.policy.numbers import numbers
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, QuotaLimits, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9


def machine(
    count: int = 2,
    memory: int = 24 * GB,
    settings: EngineSettings | None = None,
    promised: dict[str, int] | None = None,
) -> FakeController:
    devices = [DeviceSpec(f"gpu{n}", memory) for n in range(count)]
    guarantees = None
    if promised is not None:
        names = [device.id for device in devices]
        guarantees = HivedGuarantees(Configuration.of_nodes({"node0": names}, promised))
    return FakeController(Engine(devices, settings, guarantees), devices, delay=0.01)


def job(host: FakeController, name: str = "job", ranks: int = 4, **terms: object) -> None:
    """Open a gang that can use all devices."""
    most = min(ranks, len(host.devices))
    given = {"gpus": most, "gpus_min": 1, "ranks": ranks, "memory": GB, **terms}
    host.open(name, **given)  # type: ignore[arg-type]


def held(host: FakeController, name: str = "job") -> int:
    return len(host.notebooks[name].devices)


def grants(host: FakeController, name: str = "job") -> list[Grant]:
    return [d for _, d in host.decided if isinstance(d, Grant) and d.session == name]


def stops(host: FakeController, name: str = "job") -> list[Preempt]:
    return [d for _, d in host.decided if isinstance(d, Preempt) and d.session == name]


def resizes(host: FakeController, name: str = "job") -> list[tuple[float, int, str]]:
    found = []
    for at, decision in host.decided:
        if isinstance(decision, Preempt) and decision.session == name and decision.resize:
            found.append((at, decision.resize, decision.reason))
    return found


@pytest.mark.parametrize(
    ("ranks", "least", "most", "expected"),
    [
        (4, 1, 4, (1, 2, 4)),
        (4, 1, 3, (1, 2)),
        (4, 2, 4, (2, 4)),
        (8, 1, 6, (1, 2, 4)),
        (6, 1, 6, (1, 2, 3, 6)),
        (3, 1, 2, (1, 2)),
        (1, 1, 1, (1,)),
        (4, 3, 3, (2,)),
    ],
)
def test_sizes_are_those_that_divide_the_ranks_into_buddies(
    ranks: int, least: int, most: int, expected: tuple[int, ...]
) -> None:
    assert sizes(ranks, least, most) == expected


@pytest.mark.parametrize(
    ("ranks", "devices", "expected"),
    [
        (4, 1, [0, 0, 0, 0]),
        (4, 2, [0, 0, 1, 1]),
        (4, 4, [0, 1, 2, 3]),
        (6, 3, [0, 0, 1, 1, 2, 2]),
        (6, 2, [0, 0, 0, 0, 1, 1]),
        (3, 2, [0, 0, 1]),
    ],
)
def test_seats_are_intervals_of_ranks(ranks: int, devices: int, expected: list[int]) -> None:
    assert [seat_of(rank, ranks, devices) for rank in range(ranks)] == expected
    assert max(expected.count(seat) for seat in expected) == per_device(ranks, devices)


def test_a_gang_gets_all_idle_devices_at_once() -> None:
    host = machine(4)
    job(host)
    host.submit("job", 10.0)
    host.run_until(1.0)
    assert held(host) == 4
    host.run_until(12.0)
    assert host.served("job") == pytest.approx(10.0)
    assert held(host) == 0


def test_a_gang_begins_on_its_least_number_while_others_wait() -> None:
    host = machine(2, settings=EngineSettings(grow_after=1000.0))
    for name in ("a", "b"):
        host.open(name, GB)
        host.submit(name, 30.0)
    job(host)
    host.submit("job", 30.0)
    host.open("c", GB)
    host.submit("c", 30.0)
    host.run_until(200.0)
    assert {len(grant.devices) for grant in grants(host)[:2]} == {1}


def test_a_gang_needs_the_devices_on_which_its_ranks_fit() -> None:
    """Two ranks fit on a device, four do not."""
    host = machine(4, memory=10 * GB)
    job(host, memory=4 * GB)
    host.submit("job", 100.0)
    host.run_until(5.0)
    host.open("other", 0)
    host.submit("other", 1000.0)
    host.run_until(host.now + 1.0)
    assert held(host) == 2
    host.run_until(1000.0)
    assert all(size == 2 for _, size, _ in resizes(host))


def test_a_gang_shrinks_within_one_decision_for_a_premium_cell() -> None:
    host = machine(2)
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(0.2)  # its minimum run time is not over
    host.open("quick", GB, user="alice", tier=Tier.PREMIUM)
    host.submit("quick", 5.0)
    (stop,) = (d for at, d in host.decided if isinstance(d, Preempt) and at == host.now)
    assert (stop.session, stop.resize) == ("job", 1)
    assert stop.reason == "Job of 4 ranks shrinks from 2 devices to 1: quick waits with premium"
    host.run_until(host.now + 0.5)
    assert (held(host), held(host, "quick")) == (1, 1)
    assert host.engine.job_text("job") == (
        "Job of 4 ranks runs on 1 of 2 devices: quick waits with premium; it grows again when a "
        "device has been idle for 30 s"
    )


def test_a_gang_shrinks_at_once_for_a_user_with_less_service() -> None:
    host = machine(4)
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(20.0)
    host.open("other", GB, user="alice")
    host.submit("other", 500.0)
    host.run_until(20.5)
    assert (held(host), held(host, "other")) == (2, 1)
    assert all(stop.resize for stop in stops(host))


def test_a_gang_does_not_shrink_for_its_own_user_with_a_longer_cell() -> None:
    host = machine(2)
    host.open("long", GB, user="bob", device="gpu0")
    host.submit("long", 1000.0)
    host.run_until(500.0)
    host.tell(events.CellFinished(host.now, "long"))
    host.halt("long")
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(500.5)
    before = held(host)
    assert before == 2
    host.open("basic", GB, user="bob", tier=Tier.BASIC)
    host.submit("basic", 5.0)
    host.run_until(500.8)
    assert held(host) == 2  # both are at the first level, and this one is standard


def test_a_gang_on_its_least_number_takes_turns_as_any_session() -> None:
    host = machine(1)
    job(host, user="bob")
    host.open("other", GB, user="alice")
    host.submit("job", 100.0)
    host.submit("other", 100.0)
    host.run_until(60.0)
    assert {stop.resize for stop in stops(host)} == {0}
    host.run_until(2000.0)
    assert host.served("other") == pytest.approx(100.0)
    assert host.served("job") == pytest.approx(400.0)  # four ranks, one after the other


@pytest.mark.parametrize("grow_after", [0.0, 30.0])
def test_a_gang_grows_after_a_device_was_idle(grow_after: float) -> None:
    host = machine(2, settings=EngineSettings(grow_after=grow_after))
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(5.0)
    host.open("quick", GB, user="alice")
    host.submit("quick", 10.0)
    host.run_until(10.0)
    assert held(host) == 1
    host.run_until(15.7 + grow_after)
    ended = next(at for at, e in host.log if isinstance(e, events.CellFinished))
    (_, _, _), (at, size, reason) = resizes(host)
    assert at == pytest.approx(ended + grow_after)
    assert size == 2
    idle = "a device has been idle for 30 s" if grow_after else "a device is idle"
    assert reason == f"Job of 4 ranks grows from 1 device to 2: {idle}"
    host.run_until(host.now + 0.5)
    assert held(host) == 2
    assert host.engine.job_text("job") == "Job of 4 ranks runs on 2 devices"


def test_growth_is_announced_once_shortly_before() -> None:
    host = machine(2, settings=EngineSettings(grow_after=60.0))
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(5.0)
    host.open("quick", GB, user="alice")
    host.submit("quick", 10.0)
    host.run_until(150.0)
    ((at, decision),) = [(at, d) for at, d in host.decided if isinstance(d, PrepareResize)]
    grown, size, reason = resizes(host)[-1]
    assert grown - at == pytest.approx(PREPARE_SECONDS + GB / PREPARE_BYTES_PER_SECOND)
    assert (decision.session, decision.reason) == ("job", reason)
    assert sorted(decision.devices) == sorted(grants(host)[-1].devices)
    assert len(decision.devices) == size == 2


def test_a_policy_says_after_how_long_gangs_grow() -> None:
    policy = numbers(parse("jobs: {grow_after: never}"), (), EngineSettings())
    host = machine(2, settings=policy)
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(5.0)
    host.open("quick", GB, user="alice")
    host.submit("quick", 10.0)
    host.run_until(200.0)
    assert held(host) == 1
    text = host.engine.job_text("job")
    assert text is not None
    assert text.endswith("the policy does not let it grow again")
    short = numbers(parse("jobs: {grow_after: 4 s}"), (), EngineSettings())
    host.tell(events.Reconfigured(host.now, short))
    host.run_until(300.0)
    assert held(host) == 2
    assert resizes(host)[-1][2].endswith("a device has been idle for 4 s")


def test_growth_takes_steps_of_buddies() -> None:
    host = machine(4, settings=EngineSettings(grow_after=5.0))
    for index in range(3):
        host.open(f"s{index}", GB, user=f"u{index}")
        host.submit(f"s{index}", 10.0 + 20.0 * index)
    job(host)
    host.submit("job", 1000.0)
    host.run_until(200.0)
    assert [size for _, size, _ in resizes(host)] == [2, 4]


def test_growth_waits_while_another_session_could_use_the_device() -> None:
    host = machine(2, settings=EngineSettings(grow_after=3.0))
    job(host, user="bob")
    host.submit("job", 2000.0)
    for name in ("a", "b", "c"):
        host.open(name, GB, user=name)
        host.submit(name, 100.0)
    host.run_until(150.0)
    assert all(size == 1 for _, size, _ in resizes(host))
    assert held(host) <= 1


def test_growth_leaves_a_device_to_a_session_that_collects_several() -> None:
    host = machine(3, settings=EngineSettings(grow_after=3.0))
    for name in ("stays", "ends"):
        host.open(name, GB, user=name, may_preempt=False)
        host.submit(name, 500.0 if name == "stays" else 5.0)
    job(host, user="bob", ranks=2, gpus=2)
    host.submit("job", 1000.0)
    host.open("wide", GB, user="alice", gpus=3)
    host.submit("wide", 10.0)
    host.run_until(60.0)
    assert not [reason for _, _, reason in resizes(host) if "grows" in reason]
    host.run_until(600.0)
    assert host.served("wide") == pytest.approx(10.0)
    assert held(host) == 2


def test_a_gang_on_its_least_number_keeps_it_for_the_minimum_run() -> None:
    host = machine(1)
    job(host, user="bob")
    host.submit("job", 100.0)
    host.run_until(0.5)
    host.open("quick", GB, user="alice", tier=Tier.PREMIUM, device="gpu0")
    host.submit("quick", 1.0)
    host.run_until(0.9)
    assert held(host) == 1
    host.run_until(10.0)
    assert host.served("quick") == pytest.approx(1.0)


def test_quotas_count_the_devices_of_a_gang() -> None:
    limits = {("default", "bob"): QuotaLimits(devices=2)}
    host = machine(4, settings=EngineSettings(user_limits=limits, grow_after=0.0))
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(5.0)
    assert held(host) == 2
    host.open("own", GB, user="bob")
    host.submit("own", 5.0)
    host.run_until(12.0)
    assert held(host) + held(host, "own") <= 2
    host.run_until(40.0)
    assert host.served("own") == pytest.approx(5.0)
    assert held(host) == 2


def test_service_is_charged_for_every_device() -> None:
    host = machine(4)
    job(host, user="bob")
    host.submit("job", 1000.0)
    host.run_until(20.0)
    host.open("other", GB, user="alice")
    host.submit("other", 10.0)
    host.run_until(25.0)
    host.tell(events.Tick(host.now))
    served = host.engine.statistics().served
    host.engine.accounts(host.now)  # brings it up to date
    served = host.engine.statistics().served
    assert served["default", "bob"] == pytest.approx(4 * 20.0 + 2 * 5.0, abs=0.2)
    assert served["default", "alice"] == pytest.approx(5.0, abs=0.2)


def test_a_guarantee_shrinks_a_gang_that_borrows() -> None:
    host = machine(2, promised={"lab": 1})
    job(host, user="bob", vc="guests")
    host.submit("job", 1000.0)
    host.run_until(0.5)
    assert held(host) == 2
    host.open("entitled", GB, user="alice", vc="lab")
    host.submit("entitled", 50.0)
    host.run_until(1.0)
    assert (held(host), held(host, "entitled")) == (1, 1)
    ((_, size, reason),) = resizes(host)
    assert size == 1
    assert reason == (
        "Job of 4 ranks shrinks from 2 devices to 1: "
        "entitled waits for what virtual cluster lab is guaranteed"
    )


def test_a_job_whose_ranks_do_not_fit_on_fewer_devices_is_preempted_as_a_whole() -> None:
    host = machine(2, memory=10 * GB)
    job(host, ranks=2, memory=8 * GB, user="bob")
    host.submit("job", 100.0)
    host.run_until(30.0)
    host.open("other", GB, user="alice")
    host.submit("other", 5.0)
    host.run_until(31.0)
    assert (held(host), held(host, "other")) == (0, 1)
    host.run_until(300.0)
    assert host.served("job") == pytest.approx(100.0)


def test_a_gang_that_lost_a_device_continues_on_the_others() -> None:
    host = machine(2)
    job(host)
    host.submit("job", 100.0)
    host.run_until(5.0)
    host.fail("gpu1")
    host.run_until(6.0)
    assert host.notebooks["job"].devices == ("gpu0",)
    host.tell(events.DeviceHealed(host.now, "gpu1"))
    host.run_until(60.0)
    assert held(host) == 2


def test_memory_that_is_located_is_where_a_gang_returns() -> None:
    host = machine(2)
    job(host, ranks=2)
    host.resident["gpu1"]["job"] = 2 * GB
    host.notebooks["job"].homes.add("gpu1")
    host.tell(events.Located(host.now, "job", (("gpu1", 2 * GB),)))
    host.open("other", GB, device="gpu0", user="alice")
    host.submit("other", 100.0)
    host.submit("job", 10.0)
    host.run_until(1.0)
    assert host.notebooks["job"].devices == ("gpu1",)
