"""Turns on one machine, with the live settings: few moves, equal shares, short waits."""

from __future__ import annotations

import random

import pytest

from jupyter_sing.controller.controller import COPY_RATE, LIVE, SWITCH_SECONDS
from jupyter_sing.scheduler.decisions import Grant, MigrateMemory
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.settings import DeviceSpec
from tests.doubles.scheduler.controller import FakeController

MB = 10**6
THINK_SECONDS = (0.1, 0.4, 1.0, 2.5)


def machine(memory: int) -> FakeController:
    devices = [
        DeviceSpec(f"cpu:{n}", memory, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS)
        for n in range(2)
    ]
    return FakeController(Engine(devices, LIVE), devices, delay=0.005)


def moves(host: FakeController) -> list[float]:
    """Return when a session was granted another device than the one before, or migrated."""
    last: dict[str, tuple[str, ...]] = {}
    found = []
    for at, decision in host.decided:
        if isinstance(decision, MigrateMemory):
            found.append(at)
        elif isinstance(decision, Grant):
            if last.get(decision.session, decision.devices) != decision.devices:
                found.append(at)
            last[decision.session] = decision.devices
    return found


@pytest.mark.parametrize("count", [3, 5, 7])
def test_trainings_that_share_two_devices_seldom_move_and_get_as_much(count: int) -> None:
    host = machine(2000 * MB)
    names = [f"s{index}" for index in range(count)]
    for name in names:
        host.open(name, 100 * MB)
        host.submit(name, 1e6)
    host.run_until(15.0)
    assert len(moves(host)) <= 3
    host.run_until(600.0)
    assert len(moves(host)) <= 60  # one in ten seconds; at the end of each turn it would be 300
    served = [host.served(name) for name in names]
    assert min(served) > 0.92 * max(served)
    assert sum(served) > 0.97 * 2 * 600.0


def test_the_only_waiter_for_a_device_moves_at_once() -> None:
    host = machine(2000 * MB)
    for name in ("first", "second"):
        host.open(name, 100 * MB, device="cpu:0")  # both are resident there
        host.submit(name, 1e6)
    host.run_until(2.0)
    assert min(host.served(name) for name in ("first", "second")) > 1.5


@pytest.mark.parametrize("seed", range(4))
def test_eight_notebooks_with_twice_the_memory_there_is_wait_for_two_seconds_at_most(
    seed: int,
) -> None:
    dice = random.Random(seed)
    host = machine(256 * MB)

    def think(name: str) -> None:
        seconds = dice.expovariate(1 / 0.25)
        host.later(dice.choice(THINK_SECONDS), lambda: host.submit(name, seconds))

    host.finished = think
    for index in range(8):
        name = f"s{index}"
        host.open(name, 120 * MB)
        host.later(0.5 * dice.random(), lambda name=name: host.submit(name, 1.2))  # type: ignore[misc]
    host.run_until(60.0)
    waits = sorted(wait for _, wait in host.waits)
    assert len(waits) > 150
    assert waits[len(waits) // 2] < 0.5
    assert waits[int(0.99 * len(waits))] < 2.0
