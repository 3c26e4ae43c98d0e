"""Kernels that hibernate when they are unused.

The kernels, their process managers and the workers are doubles.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.agent.process.hibernation import REASON
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    Checkpoint,
    CheckpointsRequest,
    CloseSession,
    MigrateRequest,
    Resume,
    StatusRequest,
    Stop,
    StopReply,
    Suspend,
)
from tests.doubles.kernel.toy_process_manager import ToyProcessManager
from tests.doubles.waiting import wait_until
from tests.integration.checkpoints.test_checkpoints import hand_over, host_state
from tests.integration.conftest import ROOT, ToyHost

StartHost = Callable[..., ToyHost]
StartManager = Callable[..., ToyProcessManager]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def start_manager(toy_host: StartHost) -> Iterator[StartManager]:
    """Return a function that opens a session which hibernates soon, and owns its kernel."""
    managers: list[ToyProcessManager] = []

    def start(
        host: ToyHost, *, listens: bool = False, busy: bool = False, **fields: Any
    ) -> ToyProcessManager:
        session = host.open(**{"hibernate_timeout": 0.05, **fields})
        managers.append(ToyProcessManager(session, listens=listens, busy=busy))
        return managers[-1]

    yield start
    for manager in managers:
        manager.close()


def images(data: Path) -> list[Path]:
    return [path for path in data.glob("processes/*/*") if path.is_dir()]


def sessions(host: ToyHost) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in host.call(StatusRequest()).sessions}


def asleep(host: ToyHost, manager: ToyProcessManager) -> dict[str, Any] | None:
    """Return the session if it hibernates, with its device state."""
    found = sessions(host)[manager.session]
    return found if found["reason"] == REASON and found["kernel_pid"] is None else None


def wait_asleep(host: ToyHost, manager: ToyProcessManager) -> dict[str, Any]:
    found = wait_until(lambda: asleep(host, manager))
    assert not manager.kernel.lives()
    assert (found["state"], found["tier"], found["worker_pid"]) == ("suspended", "cold", None)
    return found


def test_an_unused_kernel_is_spilled_and_restored_when_its_manager_requests_it(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = 0
    for number in range(3):
        state = manager.ask("work", number)
        wait_asleep(host, manager)
        assert manager.holds
        wait_until(lambda: len(images(data)) == 1)  # earlier images are being removed
        assert manager.ask("read") == state
        assert manager.orders.count("Revive") > number  # it may hibernate again
    wait_asleep(host, manager)
    host.call(CloseSession(manager.session))
    wait_until(lambda: images(data) == [])


def test_without_disk_space_a_kernel_is_unchanged_and_the_reason_is_reported(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host(disk_quota=1 << 20)
    manager = start_manager(host)
    state = manager.ask("work", 1)

    def said() -> str:
        reason: str = sessions(host)[manager.session]["reason"]
        return reason if "Cannot hibernate" in reason else ""

    reason = wait_until(said)
    assert "on disk, and the quota has 1.0 MiB left: delete checkpoints" in reason
    assert sessions(host)[manager.session]["kernel_pid"] is not None
    assert manager.ask("read") == state
    assert "Dump" not in manager.orders
    assert images(data) == []


def test_kernels_that_hibernate_count_against_the_quota(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host(disk_quota=256 << 20)
    manager = start_manager(host)
    manager.ask("work", 1)
    wait_asleep(host, manager)
    (directory,) = images(data)
    with (directory / "pages-3.img").open("wb") as file:  # as large as the quota
        os.posix_fallocate(file.fileno(), 0, 256 << 20)
    client = host.client()
    with pytest.raises(ControlError, match="of kernels that hibernate, would take more") as refused:
        hand_over(client.session, "one", host_state(0, b"x"), b"x")
    assert refused.value.reason == "quota"
    host.call(CloseSession(manager.session))
    assert hand_over(client.session, "one", host_state(0, b"x"), b"x")["name"] == "one"


def test_a_kernel_without_a_device_hibernates_too(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host, listens=True)
    wait_asleep(host, manager)
    manager.request_process()
    manager.wait_for("Revive")
    manager.wait_for("LetThrough", 2)
    wait_asleep(host, manager)


def test_without_a_process_manager_the_device_state_alone_is_spilled(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client(hibernate_timeout=0.05)
    client.add(1)
    client.read()
    found = wait_until(lambda: host.when(client, "suspended"))
    wait_until(lambda: host.session(client)["tier"] == "cold")
    assert found["kernel_pid"] == os.getpid()
    client.add(2)
    assert client.read() == client.state


def test_a_working_kernel_does_not_hibernate(toy_host: StartHost, tmp_path: Path) -> None:
    host = toy_host()
    client = host.client(hibernate_timeout=0.05)
    with client.cell():
        client.add(1)
        client.read()
        client.append(f"wait {tmp_path / 'done'}")
        client.send_bell()
        for _ in range(20):
            assert host.session(client)["state"] == "running"
        (tmp_path / "done").touch()
    wait_until(lambda: host.session(client)["tier"] == "cold")


@pytest.mark.parametrize("order", ["Hold", "Dump"])
def test_a_kernel_that_cannot_hibernate_continues(
    toy_host: StartHost, start_manager: StartManager, data: Path, order: str
) -> None:
    host = toy_host()
    manager = start_manager(host, busy=True)
    state = manager.ask("work", 1)
    manager.refuse[order] = "it is busy"
    manager.busy = False
    manager.wait_for(order)
    assert manager.ask("read") == state
    assert sessions(host)[manager.session]["kernel_pid"] == manager.kernel.pid
    wait_until(lambda: images(data) == [])
    assert manager.orders.count(order) == 1  # no immediate retry


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("order", ["Hold", "Dump"])
def test_a_connection_that_breaks_on_the_way_to_sleep_loses_nothing(
    toy_host: StartHost, start_manager: StartManager, order: str, moment: str
) -> None:
    host = toy_host()
    manager = start_manager(host, busy=True)
    state = manager.ask("work", 1)
    getattr(manager, moment)[order] = manager.disconnect
    manager.busy = False
    manager.wait_disconnected()
    manager.connect()
    assert manager.ask("read") == state


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_connection_that_breaks_on_the_way_back_loses_nothing(
    toy_host: StartHost, start_manager: StartManager, moment: str
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = manager.ask("work", 1)
    wait_asleep(host, manager)
    getattr(manager, moment)["Revive"] = manager.disconnect
    manager.request_process()
    manager.wait_disconnected()
    manager.connect()
    assert manager.ask("read") == state


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("order", ["Hold", "Dump", "Revive"])
def test_an_agent_that_dies_on_the_way_loses_nothing(
    toy_host: StartHost, start_manager: StartManager, order: str, moment: str, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host, busy=True)
    state = manager.ask("work", 1)
    if order == "Revive":
        manager.busy = False
        wait_asleep(host, manager)
    getattr(manager, moment)[order] = host.kill_agent
    if order == "Revive":
        manager.request_process()
    manager.busy = False
    manager.wait_disconnected()
    manager.connect()
    assert manager.ask("read") == state


def test_a_kernel_that_sleeps_outlives_the_agent(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = manager.ask("work", 1)
    wait_asleep(host, manager)
    for _ in range(2):
        host.kill_agent()
        wait_asleep(host, manager)
    manager.wait_disconnected()
    manager.connect()
    assert manager.ask("read") == state


def test_a_session_whose_server_has_ended_does_not_sleep_for_ever(
    toy_host: StartHost, data: Path
) -> None:
    host = toy_host()
    session = host.open(hibernate_timeout=0.05)
    program = (
        "import sys\n"
        "from tests.doubles.kernel.toy_process_manager import ToyProcessManager\n"
        f"manager = ToyProcessManager({session!r})\n"
        "manager.ask('work', 1)\n"
        "manager.wait_for('Dump')\n"
        "print('sleeps', flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"sleeps\n"
    server.kill()
    server.communicate()
    wait_until(lambda: sessions(host) == {})
    wait_until(lambda: images(data) == [])


def test_images_that_cannot_be_revived_end_the_session_with_a_reason(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.ask("work", 1)
    wait_asleep(host, manager)
    before = manager.orders.count("Revive")  # it may have hibernated before it was asked to work
    manager.refuse["Revive"] = "a library has changed"
    manager.request_process()
    manager.wait_disconnected()
    assert manager.orders.count("Revive") == before + 2
    found = sessions(host)[manager.session]
    assert found["state"] == "failed"
    assert "its kernel cannot come back: a library has changed" in found["reason"]
    with pytest.raises(ControlError, match="has ended"):
        manager.connect()
    wait_until(lambda: len(images(data)) == 1)  # until the session is closed
    host.call(CloseSession(manager.session))
    wait_until(lambda: images(data) == [])


@pytest.mark.parametrize("verb", [Suspend, Resume, MigrateRequest, Checkpoint])
def test_requests_to_a_hibernating_kernel(
    toy_host: StartHost, start_manager: StartManager, verb: type[Any]
) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1")
    manager = start_manager(host, device="cpu:0")
    state = manager.ask("work", 1)
    wait_asleep(host, manager)
    if verb is Suspend:
        assert host.call(Suspend(manager.session)).session["reason"] == REASON
        assert manager.holds
    elif verb is MigrateRequest:
        assert host.call(MigrateRequest(manager.session, "cpu:1")).session["device"] == "cpu:1"
        assert manager.holds
    elif verb is Resume:
        assert host.call(Resume(manager.session)).session["tier"] == "resident"
    else:
        assert host.call(Checkpoint(manager.session, "mine")).checkpoint["name"] == "mine"
    assert manager.ask("read") == state


def test_a_request_without_a_process_manager_gets_the_reason(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    wait_asleep(host, manager)
    manager.disconnect()
    manager.wait_disconnected()

    def resume() -> str:
        try:
            host.call(Resume(manager.session))
        except ControlError as error:
            return error.message
        return ""

    assert "is not connected" in resume()
    manager.connect()
    manager.request_process()
    manager.wait_for("Revive")


def test_concurrent_wake_requests_wake_a_kernel_once(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = manager.ask("work", 1)
    wait_asleep(host, manager)
    before = manager.orders.count("Revive")
    manager.busy = True  # so that it does not hibernate again before all calls were made
    resuming = [
        threading.Thread(target=lambda: host.call(Resume(manager.session))) for _ in range(4)
    ]
    for thread in resuming:
        thread.start()
    manager.request_process()
    for thread in resuming:
        thread.join()
    assert manager.ask("read") == state
    assert manager.orders.count("Revive") == before + 1


def test_stopping_the_daemon_removes_what_sleeps(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.ask("work", 1)
    wait_asleep(host, manager)
    host.call(Stop())
    wait_until(lambda: images(data) == [])


def test_leftovers_of_dead_daemons_are_removed(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    wait_asleep(host, manager)
    host.kill(host.agent_pid(), host.supervisor_pid())
    manager.wait_disconnected()
    assert images(data)
    toy_host()
    wait_until(lambda: images(data) == [])


def names(host: ToyHost) -> list[str]:
    return [each["name"] for each in host.call(CheckpointsRequest()).checkpoints]


@pytest.mark.parametrize("listens", [False, True])
def test_a_notebook_is_saved_before_it_hibernates(
    toy_host: StartHost, start_manager: StartManager, listens: bool
) -> None:
    host = toy_host()
    manager = start_manager(host, listens=listens, checkpoint_every=1e6)
    manager.ask("run")
    wait_asleep(host, manager)
    (made,) = names(host)
    assert "-auto-" in made
    for _ in range(2):
        manager.ask("rest")
        wait_asleep(host, manager)
    assert names(host) == [made]  # no cell was run since
    assert host.call(Stop(checkpoint=True)) == StopReply([], [])


@pytest.mark.parametrize("listens", [False, True])
def test_a_kernel_that_sleeps_comes_back_for_its_checkpoint_before_the_end(
    toy_host: StartHost, start_manager: StartManager, listens: bool
) -> None:
    host = toy_host(stop_seconds=0.0)  # it is not busy
    manager = start_manager(host, listens=listens)
    manager.ask("run")
    wait_asleep(host, manager)
    stopped = host.call(Stop(checkpoint=True))
    assert len(stopped.checkpoints) == 1
    assert stopped.problems == []
    assert names(toy_host()) == stopped.checkpoints


def test_kernels_that_sleep_come_back_one_after_the_other_before_the_end(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host, ordered = toy_host(stop_seconds=0.0), list[tuple[str, str]]()

    def noting(manager: ToyProcessManager, order: str) -> Callable[[], object]:
        return lambda: ordered.append((order, manager.session))

    managers = [start_manager(host, kernel_id=f"k{number}") for number in range(3)]
    for manager in managers:
        manager.ask("run")
    unchanged = start_manager(host, kernel_id="unchanged", checkpoint_every=1e6)
    unchanged.ask("run")
    for manager in (*managers, unchanged):
        wait_asleep(host, manager)
        for order in ("Revive", "Dump"):
            manager.before[order] = noting(manager, order)
    stopped = host.call(Stop(checkpoint=True))
    assert (len(stopped.checkpoints), stopped.problems) == (3, [])
    # Each is resumed after the one before is stored; one whose checkpoint is current is not
    # resumed.
    pairs = [ordered[at : at + 2] for at in range(0, len(ordered), 2)]
    assert [[order for order, _ in pair] for pair in pairs] == [["Revive", "Dump"]] * 3
    assert all(one[1] == other[1] for one, other in pairs)
    assert {pair[0][1] for pair in pairs} == {manager.session for manager in managers}


def test_a_kernel_that_cannot_come_back_before_the_end_is_named(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.ask("run")
    wait_asleep(host, manager)
    manager.refuse["Revive"] = "there is no room"
    why = "toy: It hibernated, and its kernel cannot come back: there is no room"
    assert host.call(Stop(checkpoint=True)) == StopReply([], [why])
