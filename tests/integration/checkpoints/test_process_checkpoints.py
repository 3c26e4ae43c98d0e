"""Processes in checkpoints, with toy kernels, process manager doubles and toy workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    CheckpointsRequest,
    CloseSession,
    DeleteCheckpoint,
    OpenCheckpoint,
    StatusRequest,
    Tend,
)
from tests.doubles.kernel.toy_process_manager import ToyProcessManager
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]
StartManager = Callable[..., ToyProcessManager]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def images(data: Path) -> list[Path]:
    return [path for path in data.glob("processes/*/*") if path.is_dir()]


def sessions(host: ToyHost) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in host.call(StatusRequest()).sessions}


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_has_the_process_and_the_kernel_continues(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = manager.kernel.ask("work", 1)
    made = manager.kernel.ask("checkpoint", "one")
    assert (made["forms"], made["omitted"]) == (["namespace", "process"], [])
    manager.wait_for("Dump")
    assert manager.kernel.ask("read") == state
    assert manager.kernel.ask("work", 2) != state
    wait_until(lambda: images(data) == [])


def test_the_second_checkpoint_of_a_process_costs_little(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.kernel.ask("work", 1)
    first = manager.kernel.ask("checkpoint", "one")
    for name in ("two", "three"):
        made = manager.kernel.ask("checkpoint", name)
        assert made["bytes"] > first["bytes"]
        assert made["exclusive"] < 0.02 * first["stored"]
    host.call(DeleteCheckpoint("one"))
    assert manager.kernel.ask("checkpoint", "four")["exclusive"] < 0.02 * first["stored"]


def test_a_kernel_without_a_device_has_a_process_too(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host, listens=True)
    # A listening kernel does not wait for the answer.
    wait_until(lambda: sessions(host)[manager.session]["kernel_pid"] is not None)
    made = manager.kernel.ask("checkpoint", "one")
    assert made["forms"] == ["namespace", "process"]
    manager.kernel.ask("take_over", "one")
    manager.wait_for("Replace")
    assert manager.kernel.ask("checkpoint", "two")["forms"] == ["namespace", "process"]


def test_a_process_that_cannot_be_saved_is_named_and_continues(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    manager = start_manager(toy_host())
    state = manager.kernel.ask("work", 1)
    manager.refuse["Dump"] = "it uses io_uring"
    made = manager.kernel.ask("checkpoint", "one")
    assert made["forms"] == ["namespace"]
    (omission,) = made["omitted"]
    assert (omission["name"], omission["why"]) == ("the process", "it uses io_uring")
    assert manager.kernel.ask("read") == state
    refused = manager.kernel.ask("checkpoint", "two", "process")
    assert refused["error"] == "it uses io_uring"
    assert manager.kernel.ask("checkpoint", "three", "namespace")["omitted"] == []
    wait_until(lambda: images(data) == [])


def test_a_read_that_was_answered_and_not_yet_counted_is_in_the_checkpoint(
    toy_host: StartHost, start_manager: StartManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_COUNTS_LATE", "1")
    manager = start_manager(toy_host())
    manager.kernel.ask("work", 1)
    assert manager.kernel.ask("checkpoint", "one")["omitted"] == []
    manager.kernel.ask("read")
    assert manager.kernel.ask("checkpoint", "two", "process")["omitted"] == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_manager_that_disconnects_meanwhile_costs_the_process_only(
    toy_host: StartHost, start_manager: StartManager, moment: str
) -> None:
    manager = start_manager(toy_host())
    state = manager.kernel.ask("work", 1)
    getattr(manager, moment)["Dump"] = manager.disconnect
    made = manager.kernel.ask("checkpoint", "one")
    assert made["forms"] == ["namespace"]
    assert "not connected" in made["omitted"][0]["why"]
    assert manager.kernel.ask("read") == state
    manager.wait_disconnected()
    assert manager.kernel.ask("checkpoint", "two")["omitted"] == []
    manager.connect()
    assert manager.kernel.ask("checkpoint", "three")["forms"] == ["namespace", "process"]


def test_a_kernel_that_dies_while_it_is_saved_ends_its_session(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.kernel.ask("work", 1)
    manager.refuse["Dump"] = "the process ended"
    manager.before["Dump"] = manager.kernel.kill
    assert manager.kernel.ask("checkpoint", "one") is None
    wait_until(lambda: sessions(host) == {})
    wait_until(lambda: images(data) == [])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_agent_that_dies_while_a_process_is_saved_costs_the_checkpoint(
    toy_host: StartHost, start_manager: StartManager, data: Path, moment: str
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = manager.kernel.ask("work", 1)
    getattr(manager, moment)["Dump"] = host.kill_agent
    answer = manager.kernel.ask("checkpoint", "one")
    assert "was not made" in answer["error"]
    assert manager.kernel.ask("read") == state
    manager.wait_disconnected()
    manager.connect()
    manager.kernel.ask("work", 2)  # its worker died as well: its operators are replayed by then
    outcome = manager.kernel.ask("checkpoint", "two")
    assert outcome["forms"] == ["namespace", "process"], str(outcome)
    wait_until(lambda: images(data) == [])


def test_only_the_starter_of_a_kernel_manages_its_process(toy_host: StartHost) -> None:
    host = toy_host()
    with pytest.raises(ControlError, match="no session"):
        host.call(Tend("none"))


# ---------------------------------------------------------------- taking over


def test_the_process_of_a_checkpoint_takes_the_kernels_place(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host, name="lesson.ipynb")
    state = manager.kernel.ask("work", 1)
    manager.kernel.ask("checkpoint", "one")
    for number in range(3):
        before = manager.session
        later = manager.kernel.ask("work", 2 + number)
        assert later != state
        outcome = manager.kernel.ask("take_over", "one")
        assert outcome == {
            "checkpoint": "one", "variables": 1, "files": 0, "aside": {}, "problems": [],
        }  # fmt: skip
        manager.wait_for("Replace", 1 + number)
        assert manager.kernel.ask("read") == state
        assert manager.session != before
        wait_until(lambda: list(sessions(host)) == [manager.session])
        found = sessions(host)[manager.session]
        assert (found["name"], found["kernel_pid"]) == ("lesson.ipynb", manager.kernel.pid)
    wait_until(lambda: images(data) == [])
    manager.kernel.ask("work", 9)
    assert manager.kernel.ask("checkpoint", "two")["forms"] == ["namespace", "process"]
    host.call(DeleteCheckpoint("one"))
    manager.kernel.ask("work", 10)


def test_two_notebooks_continue_from_one_checkpoint(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1")
    first = start_manager(host, device="cpu:0")
    state = first.kernel.ask("work", 1)
    first.kernel.ask("checkpoint", "one")
    first.kernel.ask("work", 2)
    other = start_manager(host, device="cpu:1", name="other")
    other.kernel.ask("take_over", "one")
    other.wait_for("Replace")
    assert other.kernel.ask("read") == state
    assert other.kernel.ask("work", 5) != first.kernel.ask("work", 6)
    wait_until(lambda: set(sessions(host)) == {first.session, other.session})
    assert sessions(host)[other.session]["device"] == "cpu:1"
    for each in (first, other):
        each.kernel.ask("checkpoint", f"of-{each.session}")
        each.kernel.ask("read")


def test_a_process_comes_back_after_everything_else_has_died(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    state = manager.kernel.ask("work", 1)
    manager.kernel.ask("checkpoint", "one")
    host.kill(host.agent_pid(), host.supervisor_pid(), manager.kernel.pid)
    host = toy_host()
    other = start_manager(host)
    other.kernel.ask("work", 7)
    other.kernel.ask("take_over", "one")
    other.wait_for("Replace")
    assert other.kernel.ask("read") == state


def opened(host: ToyHost, session: str, name: str, form: str = "") -> Any:
    from kernelproxy.common.ipc import agent_client

    with agent_client.connect(start=False) as connection:
        reply, fds = connection.call_with_fds(OpenCheckpoint(name, session, form), WAIT_SECONDS)
    for fd in fds:
        os.close(fd)
    return reply


def test_the_better_form_is_opened_where_that_is_possible(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.kernel.ask("work", 1)
    manager.kernel.ask("checkpoint", "plain", "namespace")
    manager.kernel.ask("checkpoint", "one")
    found = opened(host, manager.session, "one")
    assert (found.form, found.why, found.parts, found.storages) == ("process", "", [], [])
    found = opened(host, manager.session, "one", "namespace")
    assert (found.form, found.parts) == ("namespace", [1])
    found = opened(host, manager.session, "plain")
    assert (found.form, found.why) == ("namespace", "")
    with pytest.raises(ControlError, match="but not the process"):
        opened(host, manager.session, "plain", "process")
    manager.disconnect()
    manager.wait_disconnected()
    wait_until(lambda: opened(host, manager.session, "one").why)
    found = opened(host, manager.session, "one")
    assert (found.form, found.parts) == ("namespace", [1])
    assert "not connected" in found.why
    assert opened(host, "", "one").form == "namespace"


@pytest.mark.parametrize("trouble", ["Revive", "Promise", "images", "gone"])
def test_an_image_that_cannot_be_restored_leaves_the_kernel_unchanged(
    toy_host: StartHost, start_manager: StartManager, data: Path, trouble: str
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.kernel.ask("work", 1)
    manager.kernel.ask("checkpoint", "one")
    state = manager.kernel.ask("work", 2)
    if trouble in ("Revive", "Promise"):
        manager.refuse[trouble] = "its port is taken"
    elif trouble == "gone":
        manager.before["Revive"] = manager.disconnect
    else:
        (newest,) = data.glob("states/manifests/*-checkpoints/one.json")
        chunk = max(data.glob("states/chunks/*/*"), key=lambda path: path.stat().st_size)
        chunk.write_bytes(b"damaged")
        assert newest.exists()
    answer = manager.kernel.ask("take_over", "one")
    expected = {"gone": "not connected", "images": "damaged"}
    assert expected.get(trouble, "port is taken") in answer["error"]
    assert manager.kernel.ask("read") == state
    wait_until(lambda: manager.beside is None)
    wait_until(lambda: list(sessions(host)) == [manager.kernel.session])
    wait_until(lambda: images(data) == [])


def test_a_kernel_that_cannot_be_replaced_ends_with_a_reason(
    toy_host: StartHost, start_manager: StartManager, data: Path
) -> None:
    host = toy_host()
    manager = start_manager(host)
    manager.kernel.ask("work", 1)
    manager.kernel.ask("checkpoint", "one")
    manager.refuse["Replace"] = "the kernel does not answer"
    manager.kernel.ask("take_over", "one")
    wait_until(lambda: sessions(host) == {})
    wait_until(lambda: images(data) == [])


@pytest.mark.parametrize("moment", ["before it is told", "after it was told"])
def test_an_agent_that_dies_before_the_kernel_is_replaced_leaves_that_to_the_process_manager(
    toy_host: StartHost, start_manager: StartManager, data: Path, moment: str
) -> None:
    host = toy_host()
    manager = start_manager(host, name="lesson.ipynb")
    state = manager.kernel.ask("work", 1)
    manager.kernel.ask("checkpoint", "one")
    manager.kernel.ask("work", 2)
    before = manager.session

    def die() -> None:
        host.kill_agent()
        raise ConnectionError("the order never came")

    if moment == "before it is told":
        manager.after["Promise"] = die
        assert "error" in manager.kernel.ask("take_over", "one")
    else:
        manager.before["Replace"] = die
        assert manager.kernel.ask("take_over", "one")["checkpoint"] == "one"
    manager.wait_disconnected()
    assert manager.session != before
    manager.connect()
    assert manager.kernel.ask("read") == state
    wait_until(lambda: list(sessions(host)) == [manager.session])
    found = sessions(host)[manager.session]
    assert (found["name"], found["kernel_pid"]) == ("lesson.ipynb", manager.kernel.pid)
    wait_until(lambda: images(data) == [])
    manager.kernel.ask("work", 3)
    assert manager.kernel.ask("checkpoint", "two")["forms"] == ["namespace", "process"]


def test_closing_a_session_that_continues_from_a_checkpoint_leaves_that_unchanged(
    toy_host: StartHost, start_manager: StartManager
) -> None:
    host = toy_host()
    first = start_manager(host)
    state = first.kernel.ask("work", 1)
    first.kernel.ask("checkpoint", "one")
    for _ in range(2):
        other = start_manager(host)
        other.kernel.ask("take_over", "one")
        other.wait_for("Replace")
        assert other.kernel.ask("read") == state
        host.call(CloseSession(other.session))
    assert [each["name"] for each in host.call(CheckpointsRequest()).checkpoints] == ["one"]
