"""Checkpoints of kernels whose processes have started others with sessions, all of them toys."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.agent.children.child_saver import LEAVE_SECONDS
from kernelproxy.common.protocol import CheckpointsRequest, StatusRequest
from tests.doubles.kernel.toy_process_manager import ToyProcessManager
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]
StartManager = Callable[..., ToyProcessManager]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def sessions(host: ToyHost) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in host.call(StatusRequest()).sessions}


def family(manager: ToyProcessManager, count: int = 2) -> list[list[Any]]:
    """Start processes that use the device; return the id and the pid of each."""
    found = [manager.kernel.ask("start") for _ in range(count)]
    for number in range(count):
        manager.kernel.ask("tell", number, "work", number)
    return found


def all_continue(manager: ToyProcessManager, states: list[int]) -> None:
    """Check that a kernel and its processes are as they were, and use the device."""
    kernel = manager.kernel
    assert kernel.ask("read") == states[0]
    for number, state in enumerate(states[1:]):
        assert kernel.ask("tell", number, "read") == state
        assert kernel.ask("tell", number, "work", 7) != state


def states(manager: ToyProcessManager, count: int = 2) -> list[int]:
    kernel = manager.kernel
    return [kernel.ask("work", 5), *(kernel.ask("tell", n, "read") for n in range(count))]


def omitted(made: dict[str, Any]) -> str:
    """Return why a checkpoint has only the variables."""
    assert made["forms"] == ["namespace"], made
    (omission,) = made["omitted"]
    assert omission["name"] == "the process"
    return str(omission["why"])


def test_a_checkpoint_contains_the_processes_and_all_continue(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    manager = start_manager(toy_host())
    family(manager)
    for name in ("one", "two"):
        before = states(manager)
        made = manager.kernel.ask("checkpoint", name, "process")
        assert (made["forms"], made["omitted"]) == (["namespace", "process"], [])
        all_continue(manager, before)


def test_a_process_that_does_not_detach_is_named_and_all_continue(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host, name="a.ipynb")
    (_, _), (_, pid) = family(manager)
    before = states(manager)
    manager.kernel.ask("tell", 1, "refuse", "It is busy.")
    why = omitted(manager.kernel.ask("checkpoint", "one"))
    assert why == f"a.ipynb rank (process {pid}): It is busy."
    refused = manager.kernel.ask("checkpoint", "two", "process")
    assert refused["error"] == why
    assert "Dump" not in manager.orders
    all_continue(manager, before)
    manager.kernel.ask("tell", 1, "refuse", "")
    assert manager.kernel.ask("checkpoint", "two", "process")["omitted"] == []
    made = host.call(CheckpointsRequest()).checkpoints
    assert {each["name"] for each in made} == {"one", "two"}


def test_a_process_that_ends_instead_of_detaching_is_named_at_once(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    (_, _), (session, pid) = family(manager)
    before = states(manager)
    manager.kernel.ask("tell", 1, "end_instead")
    begin = time.monotonic()
    why = omitted(manager.kernel.ask("checkpoint", "one"))
    assert why == f"toy rank (process {pid}): Its process has disconnected: try again."
    assert time.monotonic() - begin < LEAVE_SECONDS
    all_continue(manager, before[:2])
    wait_until(lambda: session not in sessions(host))
    assert manager.kernel.ask("checkpoint", "two", "process")["omitted"] == []


def test_a_process_that_dies_meanwhile_is_named_and_the_others_continue(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    (_, _), (session, pid) = family(manager)
    before = states(manager)

    manager.before["Dump"] = lambda: os.kill(pid, signal.SIGKILL)
    made = manager.kernel.ask("checkpoint", "one")
    assert omitted(made) == f"toy rank (process {pid}): It has ended meanwhile."
    all_continue(manager, before[:2])
    wait_until(lambda: session not in sessions(host))
    assert manager.kernel.ask("checkpoint", "two", "process")["omitted"] == []


def test_an_agent_that_dies_meanwhile_costs_the_checkpoint_and_all_continue(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    family(manager)
    before = states(manager)
    manager.before["Dump"] = host.kill_agent
    assert "was not made" in manager.kernel.ask("checkpoint", "one")["error"]
    manager.wait_disconnected()
    manager.connect()
    all_continue(manager, before)
    assert manager.kernel.ask("checkpoint", "two", "process")["omitted"] == []


def test_a_process_that_begins_to_use_the_device_meanwhile_is_noticed(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    family(manager)
    before = states(manager)
    manager.before["Dump"] = lambda: host.open(script=True, parent=manager.session)
    assert "has begun to use" in omitted(manager.kernel.ask("checkpoint", "one"))
    all_continue(manager, before)


def test_a_job_with_ranks_elsewhere_is_not_saved(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    manager = start_manager(toy_host())
    family(manager)
    before = states(manager)
    for number in range(2):
        manager.kernel.ask("tell", number, "join", "job", number, 3)
    why = omitted(manager.kernel.ask("checkpoint", "one"))
    assert why == "Its job has 3 ranks, and 2 of them are processes of this notebook."
    all_continue(manager, before)
    for number in range(2):
        manager.kernel.ask("tell", number, "join", "job", number, 2)
    assert manager.kernel.ask("checkpoint", "two", "process")["omitted"] == []


def test_a_process_outside_of_the_notebooks_is_not_saved(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    client = host.client(script=True, parent=manager.session)
    host.work(client)
    assert "is no process of the notebook's" in omitted(manager.kernel.ask("checkpoint", "one"))
    host.work(client)


def test_a_process_that_is_not_restored_leaves_the_kernel_unchanged(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    family(manager)
    manager.kernel.ask("checkpoint", "one", "process")
    before = states(manager)
    there = set(sessions(host))
    # A toy process manager restores the kernel alone.
    assert "is not there" in manager.kernel.ask("take_over", "one")["error"]
    all_continue(manager, before)
    wait_until(lambda: set(sessions(host)) == there)
