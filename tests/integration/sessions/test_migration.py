"""Sessions that migrate between devices under a real daemon, with toy workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernelproxy.agent.residency.worker_start import START_ATTEMPTS_MAX
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import MigrateRequest, Suspend
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

MIB = 1 << 20
TWO = "cpu:256MiB@1,cpu:256MiB@1"
StartHost = Callable[..., ToyHost]


def test_a_session_continues_on_the_device_it_migrated_to(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    client = host.client(device="cpu:0")
    before = host.work(client, 10 * MIB)
    moved = host.call(MigrateRequest(client.session, "cpu:1")).session
    assert (moved["device"], moved["tier"]) == ("cpu:1", "resident")
    assert moved["worker_pid"] != before["worker_pid"]
    cost = moved["migration"]
    assert (cost["source"], cost["target"]) == ("cpu:0", "cpu:1")
    assert 0 < cost["downtime"] <= cost["seconds"]
    client.add(2)
    assert client.read() == client.state
    devices = {each["id"]: each for each in host.status().devices}
    assert devices["cpu:0"]["sessions"] == []
    assert devices["cpu:0"]["memory_used"] == 0
    assert devices["cpu:1"]["sessions"] == [client.session]
    assert client.agent.memory_granted >= 10 * MIB


def test_a_session_that_has_not_executed_anything_yet_migrates(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(TWO)
    client, end = host.client(device="cpu:0"), tmp_path / "end"
    with client.cell(), ThreadPoolExecutor() as threads:
        host.hold(client, end)  # its first record, before which there is no snapshot
        moving = threads.submit(host.call, MigrateRequest(client.session, "cpu:1"))
        try:
            wait_until(lambda: host.when(client, "migrating") or moving.done())
        finally:
            end.touch()
        assert moving.result().session["device"] == "cpu:1"
        client.add(2)
        assert client.read() == client.state


def test_moving_a_session_to_where_it_is_changes_nothing(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    client = host.client(device="cpu:0")
    before = host.work(client)
    after = host.call(MigrateRequest(client.session, "cpu:0")).session
    assert after["worker_pid"] == before["worker_pid"]
    assert after["migration"] is None


@pytest.mark.parametrize("used", [False, True])
def test_without_a_worker_it_only_belongs_to_the_other_device(
    toy_host: StartHost, used: bool
) -> None:
    host = toy_host(TWO)
    client = host.client(device="cpu:0")
    if used:
        host.work(client)
        host.call(Suspend(client.session))
    moved = host.call(MigrateRequest(client.session, "cpu:1")).session
    assert (moved["device"], moved["worker_pid"]) == ("cpu:1", None)
    with client.cell():
        client.add(2)
        assert client.read() == client.state
    assert host.session(client)["device"] == "cpu:1"


def test_a_queued_session_finds_room_on_another_device(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    first, second = host.client(device="cpu:0"), host.client(device="cpu:0")
    for client in (second, first):
        host.work(client, 200 * MIB)
    with first.cell():
        first.read()
        second.add(2)
        wait_until(lambda: host.when(second, "queued"))
        host.call(MigrateRequest(second.session, "cpu:1"))
        assert second.read() == second.state
        assert host.session(second)["device"] == "cpu:1"


def test_a_migration_without_free_memory_is_refused(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    first, second = host.client(device="cpu:0"), host.client(device="cpu:1")
    for client in (first, second):
        host.work(client, 200 * MIB)
    with second.cell():
        second.read()
        with pytest.raises(
            ControlError, match=r"GPU 1 has too little free memory: .* needs 2\d\d\.0 MiB"
        ):
            host.call(MigrateRequest(first.session, "cpu:1"))
    found = host.session(first)
    assert (found["device"], found["state"]) == ("cpu:0", "idle")
    host.rested(second)
    host.call(MigrateRequest(first.session, "cpu:1"))  # the other session is evicted
    assert host.session(second)["state"] == "suspended"
    first.add(2)
    assert first.read() == first.state


def test_an_unknown_device_is_refused(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    with pytest.raises(ControlError, match="no device cpu:7, only cpu:0, cpu:1"):
        host.call(MigrateRequest(host.open(), "cpu:7"))


def test_a_running_program_loses_no_step(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    client = host.client(device="cpu:0")
    done = threading.Event()
    failures: list[BaseException] = []

    def move() -> None:
        try:
            for index in range(30):
                moved = host.call(MigrateRequest(client.session, f"cpu:{1 - index % 2}")).session
                assert moved["device"] == f"cpu:{1 - index % 2}"
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    client.add(0)
    mover = threading.Thread(target=move)
    mover.start()
    steps, used = 0, 0
    with client.cell():
        while not done.is_set() or steps <= 30:  # a migration may take less time than a step
            client.add(steps)
            used = (used + 3 * MIB) % (150 * MIB)
            client.use(used)
            if steps % 3 == 0:
                assert client.read() == client.state
            steps += 1
    mover.join()
    assert failures == []
    assert client.read() == client.state


def test_whatever_dies_meanwhile_changes_no_result(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    client = host.client(device="cpu:0")
    worker = host.work(client)["worker_pid"]
    pick, killers_pick = random.Random(4), random.Random(5)
    done = threading.Event()
    refused = left = 0  # kills before the next result: workers must survive at times
    counting = threading.Lock()

    def kill() -> None:
        nonlocal left
        while not done.wait(killers_pick.uniform(0.0, 0.05)):
            workers = [pid for pid in host.children() if pid != zygote]
            with counting:
                if workers and left > 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(killers_pick.choice(workers), signal.SIGKILL)
                        left -= 1

    (zygote,) = set(host.children()) - {worker}
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for index in range(60):
            with counting:
                left = pick.randrange(START_ATTEMPTS_MAX // 2 + 1)  # sometimes none is killed
            target = f"cpu:{pick.randrange(2)}"
            client.add(index)
            try:
                assert host.call(MigrateRequest(client.session, target)).session["device"] == target
            except ControlError as error:
                refused += 1
                assert "stays on" in error.message  # noqa: PT017
            assert client.read() == client.state
    finally:
        done.set()
        killer.join()
    assert refused < 60
