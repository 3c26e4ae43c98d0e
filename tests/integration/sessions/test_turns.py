"""Sessions that take turns on a device, under a real daemon with toy workers.

A worker reports a corrupt log if another one executes at the same moment (``TOY_ALONE``), which
ends its session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.framing import send_message
from kernelproxy.common.protocol import (
    CheckpointsRequest,
    CloseSession,
    MigrateRequest,
    Resume,
    StatusRequest,
    Suspend,
)
from tests.doubles.session.client import ToyClient
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

MIB = 1 << 20
StartHost = Callable[..., ToyHost]

#: Turns of 20 ms, by a controller double and by the scheduler, and turns that never end.
SHORT: dict[str, dict[str, Any]] = {
    "turns": {"quantum": 0.02},
    "engine": {"engine": {"quanta": [0.02] * 4, "run_min_switches": 0.0}},
}
LONG: dict[str, dict[str, Any]] = {
    "turns": {"quantum": 1000.0},
    "engine": {"engine": {"quanta": [1000.0] * 4}},
}


@pytest.fixture(params=["turns", "engine"])
def arbiter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_ALONE", str(tmp_path / "alone"))


def work(client: ToyClient, count: int, failures: list[BaseException]) -> threading.Thread:
    """Run a cell of this many records in a thread, and read the state repeatedly."""

    def run() -> None:
        try:
            with client.cell():
                for number in range(count):
                    client.add(number)
                    if number % 50 == 0:
                        assert client.read() == client.state
                assert client.read() == client.state
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_sessions_on_one_device_take_turns(toy_host: StartHost, arbiter: str) -> None:
    host = toy_host(**SHORT[arbiter])
    clients = [host.client(str(number)) for number in range(4)]
    for _ in range(2):
        failures: list[BaseException] = []
        threads = [work(each, 500, failures) for each in clients]
        for thread in threads:
            thread.join()
        assert failures == []
    for each in clients:
        host.rested(each)


def test_a_turn_ends_in_the_middle_of_a_cell(
    toy_host: StartHost, arbiter: str, tmp_path: Path
) -> None:
    host = toy_host(**SHORT[arbiter])
    first, second = host.client("first"), host.client("second")
    go_on = tmp_path / "go-on"
    with first.cell():
        for _ in range(100):
            first.add(1)
        host.hold(first, go_on)
        for _ in range(100):
            first.add(2)
        with second.cell():
            second.add(3)
            found = wait_until(lambda: host.when(second, "queued"))
            assert found["reason"].startswith("Waiting for ")
            assert found["queued_for"] >= 0
            assert found["queue_position"] == 1
            assert found["expected_wait"] is not None
            assert found["expected_wait"] >= 0
            go_on.touch()
            assert second.read() == second.state
        assert first.read() == first.state


def test_alone_it_is_never_queued(toy_host: StartHost, arbiter: str) -> None:
    host = toy_host(**SHORT[arbiter])
    client, seen = host.client(), set()
    for number in range(30):
        with client.cell():
            client.add(number)
            seen.add(host.session(client)["state"])
        seen.add(host.session(client)["state"])
        client.add(number)  # as the garbage collector, between two cells
        seen.add(host.session(client)["state"])
    assert "queued" not in seen
    host.rested(client)


def test_a_cell_that_queries_its_own_state_is_answered_when_its_work_is_done(
    toy_host: StartHost, arbiter: str
) -> None:
    host = toy_host(**SHORT[arbiter])
    client = host.client()
    for number in range(10):
        with client.cell():
            for _ in range(20):
                client.add(number)
            (found,) = host.call(StatusRequest(client.session)).sessions
            assert found["log_consumed"] == found["log_head"]
            assert found["state"] == "idle", found["reason"]
            assert host.session(client)["state"] == "running"  # for all other sessions


def test_a_cell_that_computes_elsewhere_releases_its_lease(
    toy_host: StartHost, arbiter: str
) -> None:
    host = toy_host(**LONG[arbiter])
    first, second = host.client("first"), host.client("second")
    with first.cell():
        first.add(1)
        assert first.read() == first.state
        with second.cell():  # while the cell of the first one runs
            second.add(2)
            assert second.read() == second.state
        first.add(3)
        assert first.read() == first.state


def test_sessions_that_do_not_fit_together_take_turns_with_the_memory(
    toy_host: StartHost, arbiter: str
) -> None:
    host = toy_host("cpu:256MiB@1", **SHORT[arbiter])
    clients = [host.client(str(number)) for number in range(3)]
    failures: list[BaseException] = []
    for each in clients:
        host.work(each, 150 * MIB)
    threads = [work(each, 300, failures) for each in clients]
    for thread in threads:
        thread.join()
    assert failures == []


def test_loading_onto_a_device_is_measured(
    toy_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "switched"
    monkeypatch.setenv("TURNS_SWITCHED", str(said))
    host = toy_host("cpu:256MiB@1", **SHORT["turns"])
    first, second = host.client("first"), host.client("second")
    for _ in range(2):
        host.work(first, 150 * MIB)
        host.work(second, 160 * MIB)
    # Their first turns load no earlier state.
    assert said.read_text().splitlines() == [f"cpu:0 {150 * MIB}", f"cpu:0 {160 * MIB}"]
    host.work(second)
    assert len(said.read_text().splitlines()) == 2  # it was resident


def test_a_turn_continues_although_the_worker_dies(toy_host: StartHost, arbiter: str) -> None:
    host = toy_host(**SHORT[arbiter])
    clients = [host.client(str(number)) for number in range(2)]
    failures: list[BaseException] = []
    threads = [work(each, 2000, failures) for each in clients]
    for number in range(6):
        host.kill_worker(clients[number % 2])
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_session_that_ends_leaves_its_turn(
    toy_host: StartHost, arbiter: str, tmp_path: Path
) -> None:
    host = toy_host(**LONG[arbiter])
    first, second = host.client("first"), host.client("second")
    host.hold(first, tmp_path / "never")
    second.add(1)
    wait_until(lambda: host.when(second, "queued"))
    host.call(CloseSession(first.session))
    assert second.read() == second.state


def test_a_waiting_session_may_end_too(toy_host: StartHost, arbiter: str, tmp_path: Path) -> None:
    host = toy_host(**SHORT[arbiter])
    first, second, third = (host.client(name) for name in ("first", "second", "third"))
    go_on = tmp_path / "go-on"
    host.hold(first, go_on)
    second.add(1)
    third.add(1)
    wait_until(lambda: host.when(second, "queued") and host.when(third, "queued"))
    host.call(CloseSession(second.session))
    go_on.touch()
    assert third.read() == third.state


def test_a_resume_that_waits_is_withdrawn_with_its_command(
    toy_host: StartHost, arbiter: str, tmp_path: Path
) -> None:
    host = toy_host(**LONG[arbiter])
    first, second = host.client("first"), host.client("second")
    host.work(second, 0)
    host.call(Suspend(second.session, "Wanted for a demonstration"))
    was = host.session(second)
    go_on = tmp_path / "go-on"
    host.hold(first, go_on)
    command = [sys.executable, "-m", "jupyter_sing.cli", "resume", second.session]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Waiting for second. ")
        wait_until(lambda: host.when(second, "queued"))
        process.kill()
    now = wait_until(lambda: host.when(second, "suspended"))
    assert [now[name] for name in ("reason", "queue_position", "suspended_by")] == [
        was[name] for name in ("reason", "queue_position", "suspended_by")
    ]
    go_on.touch()
    assert first.read() == first.state
    assert host.session(second)["state"] == "suspended"
    host.call(Resume(second.session))
    assert second.read() == second.state


def test_a_resume_of_a_magic_is_withdrawn_when_it_is_interrupted(
    toy_host: StartHost, arbiter: str, tmp_path: Path
) -> None:
    host = toy_host(**LONG[arbiter])
    first, second = host.client("first"), host.client("second")
    host.work(second, 0)
    host.call(Suspend(second.session, ""))
    go_on = tmp_path / "go-on"
    host.hold(first, go_on)
    with agent_client.connect(start=False) as connection:  # from this process, which is its kernel
        sock = connection.detach()
    send_message(sock, Resume(second.session))
    wait_until(lambda: host.when(second, "queued"))
    sock.close()
    wait_until(lambda: host.when(second, "suspended"))
    go_on.touch()
    assert first.read() == first.state


def test_suspending_and_resuming_between_turns(toy_host: StartHost, arbiter: str) -> None:
    host = toy_host(**SHORT[arbiter])
    first, second = host.client("first"), host.client("second")
    failures: list[BaseException] = []
    thread = work(first, 2000, failures)
    for _ in range(3):
        host.work(second, 0)
        host.call(Suspend(second.session))
        assert host.session(second)["state"] == "suspended"
        host.call(Resume(second.session))
    thread.join()
    assert failures == []


def test_moving_between_turns(
    toy_host: StartHost, arbiter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOY_ALONE")  # there are two devices
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **SHORT[arbiter])
    first, second = host.client("first", device="cpu:0"), host.client("second", device="cpu:0")
    failures: list[BaseException] = []
    thread = work(second, 2000, failures)
    host.work(first, 0)
    for device in ("cpu:1", "cpu:0", "cpu:1", "cpu:0"):
        host.call(MigrateRequest(first.session, device))
        assert host.session(first)["device"] == device
    thread.join()
    assert failures == []
    assert host.call(CheckpointsRequest()).checkpoints == []


def test_turns_outlive_the_agent(toy_host: StartHost, arbiter: str) -> None:
    host = toy_host(**SHORT[arbiter])
    clients = [host.client(str(number)) for number in range(3)]
    failures: list[BaseException] = []
    threads = [work(each, 1000, failures) for each in clients]
    for _ in range(3):
        host.kill_agent()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_stopped_worker_keeps_its_turn_and_loses_nothing(
    toy_host: StartHost, arbiter: str
) -> None:
    host = toy_host(still_seconds=600.0, **SHORT[arbiter])
    first, second = host.client("first"), host.client("second")
    host.work(first, 0)
    host.work(second, 0)
    worker = existing(host.session(first)["worker_pid"])
    os.kill(worker, signal.SIGSTOP)
    first.add(1)
    second.add(1)
    os.kill(worker, signal.SIGCONT)
    assert second.read() == second.state
    assert first.read() == first.state
