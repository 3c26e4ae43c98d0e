"""Memory of a GPU that is in no storage: contexts, caches, and processes that are no workers."""

from __future__ import annotations

import os
import random
import threading

import pytest

from kernelproxy.agent.devices import device_allocator, measured_memory, memory_accounts
from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.devices.memory_accounts import MemoryAccounts, WorkerMemory
from kernelproxy.agent.devices.outside_process import OutsideProcess
from kernelproxy.agent.status.session_status import describe_device
from kernelproxy.devices import configured_devices
from kernelproxy.devices.memory_meter import MemorySample, memory_meter
from tests.unit.agent.devices.gpu_double import MIB, GpuDouble, GpuSession, gpu_of, play

GRANTED, DENIED = GrantAnswer.GRANTED, GrantAnswer.DENIED


CONTEXT_BYTES = 50 * MIB


@pytest.fixture(autouse=True)
def small_and_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each time, as if the last measurement was long ago; GPUs are small."""
    monkeypatch.setattr(device_allocator, "FRESH_SECONDS", -1.0)
    monkeypatch.setattr(memory_accounts, "CONTEXT_BYTES", CONTEXT_BYTES)


def test_a_software_device_is_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:256MiB@1")
    (device,) = configured_devices()
    assert memory_meter(device) is None

    async def scenario() -> None:
        allocator = DeviceAllocator(device, MIB)
        assert not allocator.measured.present
        assert not await allocator.measured.refresh()
        allocator.measured.expect("a")
        assert allocator.ledger.free == 256 * MIB
        assert "outside" not in describe_device(allocator, [])

    play(scenario)


def test_contexts_are_charged_when_they_exceed_what_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_accounts, "CONTEXT_BYTES", 500 * MIB)

    async def scenario() -> None:
        gpu, allocator = gpu_of(10_000 * MIB, reserved=1000 * MIB)
        sessions = [GpuSession(allocator, gpu, name, 400 * MIB) for name in "abc"]
        for each in sessions:
            each.busy = True
            assert await each.need(MIB) is GRANTED
        await allocator.measured.refresh()
        # Three contexts take 1200 MiB, 200 of which are not reserved.
        assert allocator.ledger.free == (9000 - 200 - 3) * MIB
        assert await sessions[0].need(8799 * MIB) is DENIED
        assert await sessions[0].need(8798 * MIB) is GRANTED

    play(scenario)


def test_a_new_worker_is_charged_what_others_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_accounts, "CONTEXT_BYTES", 500 * MIB)
    accounts = MemoryAccounts()
    assert accounts.estimate == 500 * MIB
    sample = MemorySample(1000 * MIB, 340 * MIB, {7: 340 * MIB})
    accounts.take(sample, {"a": WorkerMemory(frozenset({7}), 40 * MIB, 64 * MIB)})
    assert accounts.estimate == 300 * MIB
    # One that has not made its context yet.
    accounts.take(sample, {"b": WorkerMemory(frozenset({8}), 0, 64 * MIB)})
    assert accounts.workers["b"].context == 300 * MIB
    assert not accounts.workers["b"].measured


def test_a_neighbours_cache_is_given_back_when_another_session_needs_it() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        first, second = (GpuSession(allocator, gpu, name, 50 * MIB) for name in "ab")
        first.busy = True
        assert await first.need(700 * MIB) is GRANTED
        first.use(700 * MIB)
        first.storages, first.cache, first.busy = 100 * MIB, 600 * MIB, False
        second.busy = True
        # The ledger could cut its grant, but the memory is free only when its cache is.
        assert await second.need(700 * MIB) is GRANTED
        assert first.given_back == 1
        assert first.suspended == 0
        assert gpu.used + 700 * MIB <= gpu.total

    play(scenario)


def test_a_cache_beyond_the_grant_is_given_back_by_a_busy_session_too() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        first, second = (GpuSession(allocator, gpu, name, 50 * MIB) for name in "ab")
        first.busy = second.busy = True
        assert await first.need(300 * MIB) is GRANTED
        await allocator.measured.refresh()
        first.storages, first.cache = 300 * MIB, 400 * MIB  # fragments, workspaces
        assert await second.need(500 * MIB) is GRANTED
        assert (first.given_back, first.cache) == (1, 0)

    play(scenario)


def test_parts_of_blocks_in_use_are_no_part_of_a_context() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        first, second = (GpuSession(allocator, gpu, name, 50 * MIB) for name in "ab")
        first.busy = second.busy = True
        assert await first.need(600 * MIB) is GRANTED
        first.use(600 * MIB)
        first.storages, first.cache, first.fragments = 100 * MIB, 500 * MIB, 500 * MIB
        assert await second.need(600 * MIB) is DENIED
        assert allocator.measured.accounts.estimate == 50 * MIB
        first.fragments, first.busy = 0, False  # the tensor in the large block is freed
        assert await second.need(600 * MIB) is GRANTED
        assert first.suspended == 0

    play(scenario)


def test_a_worker_whose_storages_change_all_the_time_says_what_it_keeps() -> None:
    accounts = MemoryAccounts()
    worker = WorkerMemory(frozenset({7}), 100 * MIB, 100 * MIB)
    accounts.take(MemorySample(1000 * MIB, 150 * MIB, {7: 150 * MIB}), {"a": worker})
    assert accounts.workers["a"].context == 50 * MIB
    # It has grown while the driver was asked: the two figures do not fit.
    worker = WorkerMemory(frozenset({7}), 300 * MIB, 300 * MIB)
    sample = MemorySample(1000 * MIB, 900 * MIB, {7: 900 * MIB})
    accounts.take(sample, {"a": worker}, changed={"a"})
    accounts.gave_back("a", worker, 200 * MIB)
    assert (accounts.workers["a"].context, accounts.workers["a"].cached) == (50 * MIB, 200 * MIB)
    assert accounts.estimate == 50 * MIB


def test_a_cache_is_kept_while_there_is_room() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        first, second = (GpuSession(allocator, gpu, name, 50 * MIB) for name in "ab")
        assert await first.need(300 * MIB) is GRANTED
        first.storages, first.cache = 100 * MIB, 200 * MIB
        assert await second.need(500 * MIB) is GRANTED
        assert (first.given_back, first.cache) == (0, 200 * MIB)

    play(scenario)


def test_a_worker_that_does_not_obey_is_suspended_if_it_is_idle() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        first, second = (GpuSession(allocator, gpu, name, 50 * MIB) for name in "ab")
        assert await first.need(700 * MIB) is GRANTED
        first.storages, first.cache, first.obeys = 100 * MIB, 600 * MIB, False
        first.busy = second.busy = True
        assert await second.need(700 * MIB) is DENIED
        first.busy = False
        assert await second.need(700 * MIB) is GRANTED
        assert first.suspended == 1

    play(scenario)


def test_processes_outside_are_seen_named_and_subtracted() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        told: list[int] = []
        allocator.measured.on_change = lambda: told.append(allocator.measured.accounts.outside)
        session = GpuSession(allocator, gpu, "a", 50 * MIB)
        session.busy = True
        assert await session.need(100 * MIB) is GRANTED
        gpu.others = {os.getpid(): 400 * MIB}
        assert await session.need(600 * MIB) is DENIED
        me: object = session
        why = allocator.kept_from(me, 600 * MIB)  # type: ignore[arg-type]
        assert f"(pid {os.getpid()})" in why
        assert "processes outside of all sessions use 400.0 MiB: python" in why
        found = describe_device(allocator, [])["outside"]
        assert found["memory"] == 400 * MIB
        assert found["contexts"] == 50 * MIB
        assert [each["pid"] for each in found["processes"]] == [os.getpid()]
        assert found["complete"]
        gpu.others = {}
        assert await session.need(600 * MIB) is GRANTED
        assert told == [400 * MIB, 0]

    play(scenario)


def test_estimates_are_charged_where_the_driver_names_no_process() -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(4000 * MIB)
        gpu.hidden = True
        first, second = (GpuSession(allocator, gpu, name, 300 * MIB) for name in "ab")
        assert await first.need(1000 * MIB) is GRANTED
        first.storages, first.cache, first.busy = 100 * MIB, 900 * MIB, True
        # Its cache looks like memory outside. Before a session is refused, all caches are emptied.
        assert await second.need(2700 * MIB) is DENIED
        assert first.given_back == 1
        assert await second.need(2600 * MIB) is GRANTED
        second.storages = 10 * MIB
        await allocator.measured.refresh()
        found = describe_device(allocator, [])["outside"]
        assert (found["complete"], found["processes"]) == (False, [])
        assert found["contexts"] == 2 * CONTEXT_BYTES

    play(scenario)


def test_an_unnamed_cache_is_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        gpu.hidden = True
        first, second = (GpuSession(allocator, gpu, name, 0) for name in "ab")
        assert await first.need(400 * MIB) is GRANTED
        first.storages, first.busy = 400 * MIB, True
        for _ in range(3):
            assert await second.need(900 * MIB) is DENIED
        assert first.given_back == 1
        monkeypatch.setattr(measured_memory, "BLIND_SECONDS", -1.0)
        assert await second.need(900 * MIB) is DENIED
        assert first.given_back == 2

    play(scenario)


def test_a_driver_that_is_silent_changes_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_memory, "MEASURE_SECONDS", 0.01)

    async def scenario() -> None:
        gpu, allocator = gpu_of(1000 * MIB)
        session = GpuSession(allocator, gpu, "a", 50 * MIB)
        assert await session.need(100 * MIB) is GRANTED
        await allocator.measured.refresh()
        free = allocator.ledger.free
        gpu.silent = True
        assert not await allocator.measured.refresh()
        assert not describe_device(allocator, [])["outside"]["complete"]
        assert allocator.ledger.free == free
        gpu.silent, count, answers = False, gpu.measured, threading.Event()
        measure = gpu.measure

        def slow() -> MemorySample | None:
            answers.wait(5.0)
            return measure()

        monkeypatch.setattr(gpu, "measure", slow)
        for _ in range(3):
            assert not await allocator.measured.refresh()
        assert allocator.ledger.free == free
        answers.set()
        monkeypatch.setattr(measured_memory, "MEASURE_SECONDS", 60.0)
        assert await allocator.measured.refresh()
        assert gpu.measured == count + 1  # it was not asked again meanwhile

    play(scenario)


def test_a_worker_that_loads_on_another_device_is_not_outside() -> None:
    accounts = MemoryAccounts()
    sample = MemorySample(1000 * MIB, 500 * MIB, {7: 300 * MIB, 8: 200 * MIB})
    accounts.take(sample, {"a": WorkerMemory(frozenset({7}), 250 * MIB, 260 * MIB)}, {8})
    assert (accounts.outside, accounts.others) == (0, {})


def test_figures_that_changed_meanwhile_are_not_used() -> None:
    accounts = MemoryAccounts()
    worker = WorkerMemory(frozenset({7}), 100 * MIB, 400 * MIB)
    accounts.take(MemorySample(1000 * MIB, 150 * MIB, {7: 150 * MIB}), {"a": worker})
    later = WorkerMemory(frozenset({7}), 140 * MIB, 400 * MIB)
    sample = MemorySample(1000 * MIB, 150 * MIB, {7: 150 * MIB})
    accounts.take(sample, {"a": later}, changed={"a"})
    assert accounts.workers["a"].context == 50 * MIB
    accounts.take(sample, {"a": later})
    assert accounts.workers["a"].context == 10 * MIB


def test_a_process_is_described_without_its_arguments() -> None:
    found = OutsideProcess.of(os.getpid(), 5)
    assert found.command.startswith("python")
    assert "-" not in found.command.partition(" ")[2]
    assert OutsideProcess.of(0x7FFFFFFF, None) == OutsideProcess(0x7FFFFFFF, None, "?", "?")


@pytest.mark.parametrize("seed", range(10))
def test_the_ledger_agrees_with_the_driver_and_grants_what_there_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(memory_accounts, "CONTEXT_BYTES", 500 * MIB)

    def check(gpu: GpuDouble, allocator: DeviceAllocator, sessions: list[GpuSession]) -> None:
        accounts = allocator.measured.accounts
        storages = sum(each.storages for each in sessions if each.resident)
        known = accounts.outside + storages + sum(e.beside for e in accounts.workers.values())
        assert abs(known - gpu.used) <= gpu.used / 100, f"seed {seed}"

    async def scenario() -> None:
        gpu, allocator = gpu_of(8000 * MIB, reserved=500 * MIB)
        context = chance.randrange(100, 500) * MIB  # of the torch that all use
        sessions = [GpuSession(allocator, gpu, name, context) for name in "abcde"]
        for _ in range(50):
            each = chance.choice(sessions)
            each.busy = chance.random() < 0.3
            wanted = chance.randrange(1, 4000) * MIB
            if each.grant < wanted and await each.need(wanted) is GRANTED:
                # It can take all of it at once, beside all that is there.
                spare = each.grant - each.storages - each.cache
                new = 0 if each.on_gpu else each.context_bytes
                assert gpu.used + new + max(0, spare) <= gpu.total, f"seed {seed}"
            if each.resident:
                each.storages = chance.randrange(each.grant + 1)
                each.cache = chance.randrange(each.grant - each.storages + 1)
            if chance.random() < 0.1:
                left = gpu.total - gpu.used + sum(e or 0 for e in gpu.others.values())
                gpu.others = {1: chance.randrange(max(1, min(left, 1000 * MIB)))}
            await allocator.measured.refresh()
            check(gpu, allocator, sessions)

    play(scenario)
