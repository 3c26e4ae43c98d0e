"""Packing two sessions on a device, kept only while measured progress is better."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Pack, Preempt, Unpack
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from tests.doubles.scheduler.controller import FakeController

GB = 10**9
DEVICE = "node0/gpu0"


def two_programs(
    may_pack: tuple[bool, bool] = (True, True), memory: int = 4 * GB, packing: bool = True
) -> FakeController:
    """Two training programs on one device, each measured alone at a step of 0.1 s."""
    devices = [DeviceSpec(DEVICE, 10 * GB)]
    settings = EngineSettings(quanta=(2.0, 4.0, 4.0, 4.0), packing=packing)
    host = FakeController(Engine(devices, settings), devices, delay=0.01)
    for name, permitted in zip(("a", "b"), may_pack, strict=True):
        host.open(name, memory, may_pack=permitted)
        host.submit(name, 10_000.0)
    measured: set[str] = set()
    while len(measured) < 2:
        host.run_until(host.now + 0.5)
        for name in host.executing(DEVICE):
            host.tell(events.Measured(host.now, name, memory, 0.2, 0.1))
            measured.add(name)
    host.run_until(host.now + 10.0)
    return host


def said(host: FakeController, kind: type) -> list[object]:
    return [decision for _, decision in host.decided if isinstance(decision, kind)]


def together(host: FakeController, step: float) -> None:
    for name in ("a", "b"):
        host.tell(events.Measured(host.now, name, 4 * GB, 0.4, step))


def test_two_that_permit_it_share_a_device() -> None:
    host = two_programs()
    assert len(said(host, Pack)) == 1
    assert sorted(host.executing(DEVICE)) == ["a", "b"]


@pytest.mark.parametrize(
    ("may_pack", "memory", "packing"),
    [
        ((True, False), 4 * GB, True),
        ((False, True), 4 * GB, True),
        ((True, True), 7 * GB, True),
        ((True, True), 4 * GB, False),
    ],
)
def test_packing_respects_permission_memory_and_policy(
    may_pack: tuple[bool, bool], memory: int, packing: bool
) -> None:
    host = two_programs(may_pack, memory, packing)
    assert said(host, Pack) == []


def test_unmeasured_sessions_are_not_packed() -> None:
    devices = [DeviceSpec(DEVICE, 10 * GB)]
    host = FakeController(Engine(devices), devices)
    for name in ("a", "b"):
        host.open(name, GB, may_pack=True)
        host.submit(name, 100.0)
    host.run_until(50.0)
    assert said(host, Pack) == []


def test_sessions_are_not_packed_while_devices_are_free() -> None:
    devices = [DeviceSpec(f"node0/gpu{i}", 10 * GB) for i in range(2)]
    host = FakeController(Engine(devices), devices)
    for name in ("a", "b"):
        host.open(name, GB, may_pack=True)
        host.submit(name, 100.0)
        host.run_until(host.now + 1.0)
        host.tell(events.Measured(host.now, name, GB, 0.2, 0.1))
    host.run_until(20.0)
    assert said(host, Pack) == []


@pytest.mark.parametrize(
    ("steps", "kept"),
    [((0.15,), True), ((0.163,), True), ((0.17,), False), ((0.19,), False), ((0.25,), False),
     ((0.15, 0.17), True), ((0.15, 0.175), True), ((0.15, 0.18), False)],
)  # fmt: skip
def test_a_pair_stays_together_while_that_is_better(steps: tuple[float, ...], kept: bool) -> None:
    """It is kept or separated for good; a kept pair may come closer to the progress of turns."""
    host = two_programs()
    for step in steps:
        together(host, step)
    host.run_until(host.now + 1.0)
    assert (said(host, Unpack) == []) is kept
    assert len(host.executing(DEVICE)) == (2 if kept else 1)


def test_the_reason_for_trying_and_keeping_a_pair_is_reported_once() -> None:
    host = two_programs()
    assert len(said(host, Pack)) == 1
    for _ in range(3):
        together(host, 0.15)
    tried, why = (each.reason for each in said(host, Pack) if isinstance(each, Pack))
    assert "tried" in tried
    assert why == (
        "together they make 1.33 times the progress of one alone, and 1.13 by turns, so that it is "
        "kept"
    )


def test_the_reason_for_separating_a_pair_is_reported() -> None:
    host = two_programs()
    together(host, 0.25)
    host.run_until(host.now + 1.0)
    (parted,) = said(host, Unpack)
    assert isinstance(parted, Unpack)
    assert (
        parted.reason
        == "together they make 0.80 times the progress of one alone, and 1.13 by turns"
    )


def test_unpacked_pairs_are_retried_after_growing_pauses() -> None:
    host = two_programs()
    tries = []
    for _ in range(3):
        before = len(said(host, Pack))
        together(host, 0.25)
        parted = host.now
        while len(said(host, Pack)) == before:
            host.run_until(host.now + 1.0)
        tries.append(host.now - parted)
        host.run_until(host.now + 1.0)
    assert 60.0 <= tries[0] < 120.0 <= tries[1] < 240.0 <= tries[2]


def test_the_other_one_continues_when_one_is_done() -> None:
    host = two_programs()
    (pack,) = said(host, Pack)
    assert isinstance(pack, Pack)
    first, second = pack.sessions
    host.halt(first)
    host.tell(events.CellFinished(host.now, first))
    host.run_until(host.now + 50.0)
    assert host.executing(DEVICE) == [second]
    host.open("next", GB)
    host.submit("next", 1.0)
    host.run_until(host.now + 5.0)
    assert [name for name, _ in host.waits][-1] == "next"


def test_a_short_cell_stops_both() -> None:
    host = two_programs()
    host.run_until(host.now + 100.0)
    host.open("short", GB)
    host.submit("short", 1.0)
    host.run_until(host.now + 0.5)
    assert host.executing(DEVICE) == ["short"]
    stops = [d.session for d in said(host, Preempt)[-2:] if isinstance(d, Preempt)]
    assert sorted(stops) == ["a", "b"]


def test_a_shared_device_is_charged_once() -> None:
    host = two_programs()
    host.run_until(host.now + 40.0)
    host.open("short", GB)
    host.submit("short", 1.0)  # preempts both, which settles their accounts
    host.run_until(host.now + 0.5)
    charged = host.engine.statistics().served
    assert host.now - 2.0 <= sum(charged.values()) <= host.now
    assert abs(charged["default", "a"] - charged["default", "b"]) < 5.0
