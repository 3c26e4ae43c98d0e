"""Promises of tiers: to which sessions, when they count as missed, and the message about it."""

from __future__ import annotations

import math
from random import Random

import pytest

from jupyter_sing.controller.controller import COPY_RATE, LIVE, SWITCH_SECONDS
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import GuaranteeChanged
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.fairness.tier_targets import most
from jupyter_sing.scheduler.settings import TARGETS, DeviceSpec, Tier
from tests.doubles.scheduler.controller import FakeController

MIB = 1 << 20


def machine(count: int) -> FakeController:
    """Return a controller double with the settings of the live controller."""
    devices = [
        DeviceSpec(
            f"gpu{n}", 256 * MIB, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS
        )
        for n in range(count)
    ]
    return FakeController(Engine(devices, LIVE), devices, delay=0.005)


def work(host: FakeController, names: list[str], load: float, seconds: float, hours: float) -> None:
    """Let notebooks request a part of a device each, in cells of this many seconds on average."""
    random = Random(1)

    def think(name: str) -> None:
        pause = random.expovariate(load / (seconds * (1.0 - load)))
        host.later(pause, lambda: host.submit(name, random.expovariate(1.0 / seconds)))

    host.finished = think
    for name in names:
        think(name)
    host.run_until(hours * 3600.0)


@pytest.mark.parametrize("seconds", [0.2, 4.0])
def test_at_a_low_load_no_target_is_missed(seconds: float) -> None:
    """Eight standard notebooks request a third of two devices in total, with twice their memory."""
    host = machine(2)
    names = [f"s{n}" for n in range(8)]
    for name in names:
        host.open(name, 120 * MIB)
    work(host, names, 2 / 3 / 8, seconds, 1.2 if seconds < 1.0 else 3.0)
    assert len(host.waits) > 1000
    assert host.engine.statistics().tier_violations == 0


def test_a_session_with_a_third_misses_a_higher_guarantee_once_an_hour() -> None:
    host = machine(1)
    for name in ("a", "b", "c"):
        host.open(name, 60 * MIB)
        host.submit(name, 1e6)
    host.open("basic", 60 * MIB, tier=Tier.BASIC)
    host.submit("basic", 1e6)
    host.run_until(1800.0)
    assert host.engine.statistics().tier_violations == 0
    host.run_until(3.5 * 3600.0)
    assert host.engine.statistics().tier_violations == 9


def said(host: FakeController, session: str) -> list[tuple[bool, str]]:
    """Return the decisions about the promise to a session."""
    found = [d for _, d in host.decided if isinstance(d, GuaranteeChanged) and d.session == session]
    return [(each.kept, each.reason) for each in found]


def test_a_session_without_the_guarantee_of_its_tier_is_notified_and_is_next() -> None:
    host = machine(1)
    for name in ("first", "second", "third"):
        host.open(name, MIB, tier=Tier.PREMIUM)
    why = "best effort: with it, premium sessions may need 1.05 devices at once, and there is 1"
    assert [said(host, name) for name in ("first", "second", "third")] == [
        [],
        [(False, why)],
        [(False, why)],
    ]
    kept = [host.engine.admission(name).kept for name in ("first", "second", "third")]
    assert kept == [True, False, False]
    host.tell(events.SessionRemoved(0.0, "first"))
    assert [kept for kept, _ in said(host, "second")] == [False, True]
    assert [kept for kept, _ in said(host, "third")] == [False]
    host.tell(events.TermsChanged(0.0, "second", Tier.BASIC, 1.0, False, False))
    assert [kept for kept, _ in said(host, "third")] == [False, True]


def test_a_guarantee_in_effect_is_not_revoked_for_another_session() -> None:
    host = machine(1)
    host.open("older", MIB, tier=Tier.BASIC)
    host.open("newer", MIB, tier=Tier.PREMIUM)
    host.tell(events.TermsChanged(0.0, "older", Tier.PREMIUM, 1.0, False, False))
    assert host.engine.admission("newer").kept
    assert not host.engine.admission("older").kept


@pytest.mark.parametrize(("devices", "premium", "standard"), [(1, 1, 9), (2, 21, 38), (4, 61, 95)])
def test_number_of_sessions_that_can_be_guaranteed(
    devices: int, premium: int, standard: int
) -> None:
    for tier, count in ((Tier.PREMIUM, premium), (Tier.STANDARD, standard)):
        host = machine(devices)
        for index in range(count + 1):
            host.open(f"s{index}", 0, tier=tier)
        assert most(tier, devices, TARGETS, LIVE.duty) == count
        assert host.engine.admission(f"s{count - 1}").kept
        assert not host.engine.admission(f"s{count}").kept
    assert most(Tier.BASIC, devices, TARGETS, LIVE.duty) == math.inf
