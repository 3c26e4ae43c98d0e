"""Limits of users and virtual clusters: they hold, and do not make other sessions wait."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Decision, Evict, Grant, Preempt, Queued
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.fairness.quotas import DAY, SLOT, Day
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, QuotaLimits, Tier
from tests.doubles.scheduler.controller import FakeController

GIB = 1 << 30
QUANTA = (2.0, 4.0, 4.0, 4.0)


def machine(
    count: int,
    grace: QuotaLimits | None = None,
    vc: QuotaLimits | None = None,
    memory: int = 24 * GIB,
) -> FakeController:
    found = EngineSettings(
        quanta=QUANTA,
        user_limits={("default", "grace"): grace} if grace else {},
        vc_limits={"default": vc} if vc else {},
    )
    devices = [DeviceSpec(f"node0/gpu{index}", memory) for index in range(count)]
    return FakeController(Engine(devices, found), devices, delay=0.01)


def begin(
    host: FakeController, name: str, seconds: float, user: str = "grace", **terms: object
) -> None:
    terms = {"memory": GIB, **terms}
    host.open(name, user=user, **terms)  # type: ignore[arg-type]
    host.submit(name, seconds)


def held(host: FakeController, *prefixes: str) -> int:
    """Return the number of devices of the sessions whose names begin like this."""
    return sum(name.startswith(prefixes) for names in host.holders.values() for name in names)


def queued(host: FakeController, session: str) -> list[Queued]:
    return [d for _, d in host.decided if isinstance(d, Queued) and d.session == session]


class TestDevices:
    def test_users_stay_within_their_limits(self) -> None:
        host = machine(4, QuotaLimits(devices=2))
        for index in range(4):
            begin(host, f"s{index}", 30.0)
        for _ in range(200):
            assert held(host, "s") <= 2
            host.run_until(host.now + 0.5)
        assert all(host.served(f"s{index}") == pytest.approx(30.0) for index in range(4))

    def test_the_reason_has_the_numbers(self) -> None:
        host = machine(4, QuotaLimits(devices=3))
        for index in range(4):
            begin(host, f"s{index}", 30.0)
        (said,) = queued(host, "s3")
        assert said.reason == "grace has 3 of 3 devices: waits until one of them is given back"
        explained = host.engine.explain("s3", host.now)
        assert explained is not None
        assert (explained.position, explained.reason) == (1, said.reason)

    def test_others_do_not_wait_for_a_user_at_a_limit(self) -> None:
        host = machine(2, QuotaLimits(devices=1))
        for index in range(40):  # more than a round skips
            begin(host, f"s{index}", 1000.0)
        begin(host, "other", 5.0, user="ada")
        host.run_until(1.0)
        assert held(host, "s") == 1
        assert held(host, "other") == 1

    def test_sessions_of_one_user_take_turns_within_a_limit(self) -> None:
        host = machine(3, QuotaLimits(devices=1))
        begin(host, "long", 1000.0)
        host.run_until(100.0)
        begin(host, "short", 1.0)
        host.run_until(103.0)
        assert host.served("short") == pytest.approx(1.0)
        begin(host, "second", 1000.0)
        before = host.served("long")
        host.run_until(303.0)
        assert abs(host.served("long") - before - host.served("second")) < 30.0
        assert held(host, "long", "second") == 1

    def test_users_of_a_virtual_cluster_take_turns_within_its_limit(self) -> None:
        host = machine(3, vc=QuotaLimits(devices=1))
        for user in ("ann", "bob"):
            begin(host, user, 1000.0, user=user)
        host.open("free", GIB, vc="other")
        host.submit("free", 1000.0)
        host.run_until(200.0)
        assert abs(host.served("ann") - host.served("bob")) < 10.0
        assert host.served("ann") + host.served("bob") > 190.0
        assert host.served("free") > 199.0

    def test_a_session_that_is_bound_takes_turns_elsewhere(self) -> None:
        host = machine(2, QuotaLimits(devices=1))
        begin(host, "one", 100.0, bound="node0/gpu0")
        begin(host, "two", 100.0, bound="node0/gpu1")
        host.run_until(60.0)
        assert min(host.served("one"), host.served("two")) > 20.0

    def test_a_gang_takes_the_place_of_several(self) -> None:
        host = machine(4, QuotaLimits(devices=2))
        begin(host, "one", 1000.0)
        begin(host, "two", 1000.0)
        host.run_until(100.0)
        begin(host, "gang", 10.0, gpus=2)
        host.run_until(130.0)
        assert host.served("gang") == pytest.approx(10.0)

    @pytest.mark.parametrize(
        ("limit", "gpus", "reason"),
        [
            (0, 1, "The policy does not let grace use devices"),
            (2, 3, "grace may have 2 devices at once, and this session needs 3"),
        ],
    )
    def test_impossible_requests_are_refused_at_once(
        self, limit: int, gpus: int, reason: str
    ) -> None:
        host = machine(4, QuotaLimits(devices=limit))
        begin(host, "s", 1.0, gpus=gpus)
        begin(host, "other", 1.0, user="ada")
        host.run_until(1000.0)
        (said,) = queued(host, "s")
        explained = host.engine.explain("s", host.now)
        assert explained is not None
        assert (said.reason, explained.expected_wait) == (reason, math.inf)
        assert held(host, "s") == 0
        assert host.served("other") == 1.0

    def test_a_lower_limit_revokes_nothing(self) -> None:
        host = machine(3)
        for index in range(3):
            begin(host, f"s{index}", 50.0)
        host.run_until(5.0)
        limits = {("default", "grace"): QuotaLimits(devices=1)}
        assert host.tell(events.Reconfigured(5.0, EngineSettings(user_limits=limits))) == []
        begin(host, "s3", 10.0)
        host.run_until(200.0)
        assert all(host.served(f"s{index}") == pytest.approx(50.0) for index in range(3))
        assert host.served("s3") == 10.0
        last = host.decided.index(
            next(d for d in host.decided if isinstance(d[1], Grant) and d[1].session == "s3")
        )
        assert not any(isinstance(d, Grant) and d.session == "s3" for _, d in host.decided[:last])

    def test_a_higher_limit_holds_at_once(self) -> None:
        host = machine(2, QuotaLimits(devices=0))
        begin(host, "s", 10.0)
        assert held(host, "s") == 0
        (grant,) = host.tell(events.Reconfigured(0.0, EngineSettings()))
        assert isinstance(grant, Grant)


class TestDeviceTime:
    def test_at_the_limit_the_turn_ends_and_the_rest_waits_a_day(self) -> None:
        host = machine(1, QuotaLimits(gpu_seconds_per_day=100.0))
        begin(host, "s", 300.0)
        host.run_until(1000.0)
        assert 99.0 <= host.served("s") <= 100.0 + max(QUANTA)
        stops = [d for _, d in host.decided if isinstance(d, Preempt)]
        assert len(stops) == 1
        said = queued(host, "s")[-1]
        assert said.reason.startswith(
            "grace has used 0.03 of 0.03 hours of device time in 24 hours"
        )
        explained = host.engine.explain("s", host.now)
        assert explained is not None
        assert explained.expected_wait is not None
        assert DAY - 1100.0 < explained.expected_wait <= DAY + SLOT
        host.run_until(host.now + explained.expected_wait + 1.0)
        assert held(host, "s") == 1
        host.run_until(4 * DAY)
        assert host.served("s") == pytest.approx(300.0)

    def test_others_continue(self) -> None:
        host = machine(1, QuotaLimits(gpu_seconds_per_day=50.0))
        begin(host, "s", 300.0)
        begin(host, "other", 300.0, user="ada")
        host.run_until(500.0)
        assert host.served("other") == pytest.approx(300.0)
        assert host.served("s") < 60.0

    def test_all_sessions_of_a_virtual_cluster_count(self) -> None:
        host = machine(2, vc=QuotaLimits(gpu_seconds_per_day=100.0))
        for name in ("ann", "bob"):
            begin(host, name, 300.0, user=name)
        host.run_until(1000.0)
        assert host.served("ann") + host.served("bob") < 100.0 + 2 * max(QUANTA) + 1.0
        explained = host.engine.explain("ann", host.now)
        assert explained is not None
        assert explained.reason.startswith("virtual cluster default has used")

    def test_none_at_all(self) -> None:
        host = machine(1, QuotaLimits(gpu_seconds_per_day=0.0))
        begin(host, "s", 1.0)
        host.run_until(3 * DAY)
        assert host.served("s") == 0.0
        assert queued(host, "s")[0].reason == "The policy gives grace no device time"

    @given(
        cells=st.lists(
            st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(1, 4)), max_size=30
        )
    )
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    def test_a_day_never_counts_less_than_the_last_24_hours(
        self, cells: list[tuple[int, int, int]]
    ) -> None:
        day, now = Day(), 0.0
        used: list[tuple[float, float, int]] = []
        for gap, length, devices in cells:
            begins, now = now + gap * 1800.0, now + gap * 1800.0 + length * 700.0
            day.add(begins, now, devices)
            used.append((begins, now, devices))
            exact, above = (
                sum(n * max(0.0, end - max(begin, now - span)) for begin, end, n in used)
                for span in (DAY, DAY + SLOT)
            )
            assert exact - 1e-6 <= day.used(now) <= above + 1e-6


class TestMemory:
    def test_idle_sessions_of_the_same_user_make_room(self) -> None:
        host = machine(1, QuotaLimits(device_memory=10 * GIB))
        for name in ("first", "second"):
            begin(host, name, 1.0, memory=5 * GIB)
            host.run_until(host.now + 5.0)
        begin(host, "other", 1.0, user="ada", memory=5 * GIB)
        host.run_until(host.now + 5.0)
        begin(host, "third", 1.0, memory=5 * GIB)
        host.run_until(host.now + 5.0)
        assert [d.session for _, d in host.decided if isinstance(d, Evict)] == ["first"]
        assert host.served("third") == 1.0

    def test_executing_sessions_are_waited_for(self) -> None:
        host = machine(2, QuotaLimits(device_memory=10 * GIB))
        begin(host, "first", 20.0, memory=8 * GIB)
        host.run_until(1.0)
        begin(host, "second", 1.0, memory=8 * GIB)
        begin(host, "other", 1.0, user="ada")
        host.run_until(3.0)
        assert host.served("other") == 1.0
        (said,) = queued(host, "second")
        assert said.reason == (
            "grace has 8.0 GiB of 10.0 GiB on devices, and this session needs 8.0 GiB: waits until"
            " some of it is given back"
        )
        host.run_until(100.0)
        assert host.served("second") == 1.0

    def test_a_session_over_the_limit_alone_returns_when_all_others_have_left(self) -> None:
        host = machine(2, QuotaLimits(device_memory=10 * GIB))
        begin(host, "other", 20.0, memory=1 * GIB)
        host.run_until(1.0)
        begin(host, "s", 1.0, memory=12 * GIB)
        host.run_until(3.0)
        (said,) = queued(host, "s")
        assert said.reason == (
            "grace has 1.0 GiB of 10.0 GiB on devices, and this session needs 12.0 GiB: waits"
            " until some of it is given back"
        )
        assert held(host, "s") == 0
        host.run_until(100.0)
        assert host.served("s") == 1.0
        assert [d.session for _, d in host.decided if isinstance(d, Evict)] == ["other"]

    def test_a_session_that_grew_on_its_device_may_continue_there(self) -> None:
        host = machine(1, QuotaLimits(device_memory=10 * GIB))
        begin(host, "s", 5.0, memory=8 * GIB)
        host.run_until(2.0)
        host.notebooks["s"].memory = 12 * GIB
        host.tell(events.Measured(2.0, "s", 12 * GIB, 0.0))
        host.run_until(10.0)
        host.submit("s", 1.0)
        host.run_until(20.0)
        assert host.served("s") == pytest.approx(6.0)

    def test_sessions_about_to_become_resident_count(self) -> None:
        host = machine(3, QuotaLimits(device_memory=10 * GIB))
        begin(host, "idle", 1.0, memory=5 * GIB)
        host.run_until(1.4)  # its memory takes a while to leave
        for name in ("one", "two"):
            begin(host, name, 1.0, memory=6 * GIB)
        for _ in range(100):
            assert (
                sum(size for here in host.resident.values() for size in here.values()) <= 10 * GIB
            )
            host.run_until(host.now + 0.1)
        assert host.served("one") == host.served("two") == 1.0

    def test_many_waiters_for_memory_are_all_served(self) -> None:
        host = machine(8, QuotaLimits(device_memory=10 * GIB))
        for index in range(30):
            begin(host, f"s{index}", 2.0, memory=4 * GIB)
        host.run_until(120.0)
        assert all(host.served(f"s{index}") == pytest.approx(2.0) for index in range(30))


class Book:
    """Sums up what each user has, from decisions and events only."""

    def __init__(self, host: FakeController, limits: Mapping[str, QuotaLimits]) -> None:
        self.host = host
        self.limits = limits
        self.owner: dict[str, str] = {}

    def check(self) -> None:
        for user, limits in self.limits.items():
            mine = {name for name, owner in self.owner.items() if owner == user}
            devices = sum(name in mine for names in self.host.holders.values() for name in names)
            assert devices <= limits.devices, (user, devices)
            placed = sum(
                max((here.get(name, 0) for here in self.host.resident.values()), default=0)
                for name in mine
            )
            assert placed <= limits.device_memory, (user, placed)


@given(
    data=st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob", "cyd"]),
            st.integers(0, 3),
            st.sampled_from([0.3, 3.0, 30.0]),
            st.integers(1, 9),
            st.sampled_from([0.0, 1.0, 20.0]),
            st.sampled_from(list(Tier)),
        ),
        min_size=4,
        max_size=25,
    ),
    count=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_limits_hold_whatever_happens_and_everybody_is_served(
    data: list[tuple[str, int, float, int, float, Tier]], count: int
) -> None:
    limits = {"ann": QuotaLimits(devices=1), "bob": QuotaLimits(devices=2, device_memory=10 * GIB)}
    devices = [DeviceSpec(f"node0/gpu{index}", 16 * GIB) for index in range(count)]
    found = EngineSettings(
        quanta=(1.0, 2.0, 4.0, 8.0),
        user_limits={("default", user): each for user, each in limits.items()},
        vc_limits={"default": QuotaLimits(devices=2)},
    )
    host = FakeController(Engine(devices, found), devices, delay=0.01)
    book = Book(host, limits)
    tell = host.tell

    def checked(event: events.Event) -> list[Decision]:
        decided = tell(event)
        book.check()
        assert sum(bool(names) for names in host.holders.values()) <= 2
        return decided

    host.tell = checked  # type: ignore[method-assign]
    busy: set[str] = set()
    host.finished = busy.discard
    for user, number, seconds, memory, pause, tier in data:
        name = f"{user}{number}"
        if name not in host.notebooks:
            host.open(name, memory * GIB, user=user, tier=tier)
        book.owner[name] = user
        if name not in busy:
            busy.add(name)
            host.submit(name, seconds)
        host.run_until(host.now + pause)
    host.run_until(host.now + 20_000.0)
    assert not busy, "somebody starves"
