"""Processes in checkpoints, with toy kernels, process manager doubles and toy workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
from tests.doubles.kernel.toy_process_manager import ToyTender
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]
StartTender = Callable[..., ToyTender]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def tended(toy_host: StartHost) -> Iterator[StartTender]:
    """Return a function that opens a session of a host, and owns its kernel."""
    tenders: list[ToyTender] = []

    def start(host: ToyHost, *, listens: bool = False, **fields: Any) -> ToyTender:
        tenders.append(ToyTender(host.open(**fields), listens=listens))
        return tenders[-1]

    yield start
    for tender in tenders:
        tender.close()


def images(data: Path) -> list[Path]:
    return [path for path in data.glob("processes/*/*") if path.is_dir()]


def sessions(host: ToyHost) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in host.call(StatusRequest()).sessions}


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_has_the_process_and_the_kernel_goes_on(
    toy_host: StartHost, tended: StartTender, data: Path
) -> None:
    host = toy_host()
    tender = tended(host)
    state = tender.kernel.ask("work", 1)
    made = tender.kernel.ask("checkpoint", "one")
    assert (made["forms"], made["omitted"]) == (["namespace", "process"], [])
    tender.wait_for("Dump")
    assert tender.kernel.ask("read") == state
    assert tender.kernel.ask("work", 2) != state
    wait_until(lambda: images(data) == [])


def test_the_second_checkpoint_of_a_process_costs_little(
    toy_host: StartHost, tended: StartTender
) -> None:
    host = toy_host()
    tender = tended(host)
    tender.kernel.ask("work", 1)
    first = tender.kernel.ask("checkpoint", "one")
    for name in ("two", "three"):
        made = tender.kernel.ask("checkpoint", name)
        assert made["bytes"] > first["bytes"]
        assert made["exclusive"] < 0.02 * first["stored"]
    host.call(DeleteCheckpoint("one"))
    assert tender.kernel.ask("checkpoint", "four")["exclusive"] < 0.02 * first["stored"]


def test_a_kernel_without_a_device_has_a_process_too(
    toy_host: StartHost, tended: StartTender
) -> None:
    host = toy_host()
    tender = tended(host, listens=True)
    # A listening kernel does not wait for the answer.
    wait_until(lambda: sessions(host)[tender.session]["kernel_pid"] is not None)
    made = tender.kernel.ask("checkpoint", "one")
    assert made["forms"] == ["namespace", "process"]
    tender.kernel.ask("take_over", "one")
    tender.wait_for("Replace")
    assert tender.kernel.ask("checkpoint", "two")["forms"] == ["namespace", "process"]


def test_a_process_that_cannot_be_saved_is_named_and_goes_on(
    toy_host: StartHost, tended: StartTender, data: Path
) -> None:
    tender = tended(toy_host())
    state = tender.kernel.ask("work", 1)
    tender.refuse["Dump"] = "it uses io_uring"
    made = tender.kernel.ask("checkpoint", "one")
    assert made["forms"] == ["namespace"]
    (omission,) = made["omitted"]
    assert (omission["name"], omission["why"]) == ("the process", "it uses io_uring")
    assert tender.kernel.ask("read") == state
    refused = tender.kernel.ask("checkpoint", "two", "process")
    assert refused["error"] == "it uses io_uring"
    assert tender.kernel.ask("checkpoint", "three", "namespace")["omitted"] == []
    wait_until(lambda: images(data) == [])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_tender_that_leaves_meanwhile_costs_the_process_only(
    toy_host: StartHost, tended: StartTender, moment: str
) -> None:
    tender = tended(toy_host())
    state = tender.kernel.ask("work", 1)
    getattr(tender, moment)["Dump"] = tender.disconnect
    made = tender.kernel.ask("checkpoint", "one")
    assert made["forms"] == ["namespace"]
    assert "not connected" in made["omitted"][0]["why"]
    assert tender.kernel.ask("read") == state
    tender.wait_disconnected()
    assert tender.kernel.ask("checkpoint", "two")["omitted"] == []
    tender.connect()
    assert tender.kernel.ask("checkpoint", "three")["forms"] == ["namespace", "process"]


def test_a_kernel_that_dies_while_it_is_saved_ends_its_session(
    toy_host: StartHost, tended: StartTender, data: Path
) -> None:
    host = toy_host()
    tender = tended(host)
    tender.kernel.ask("work", 1)
    tender.refuse["Dump"] = "the process ended"
    tender.before["Dump"] = tender.kernel.kill
    assert tender.kernel.ask("checkpoint", "one") is None
    wait_until(lambda: sessions(host) == {})
    wait_until(lambda: images(data) == [])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_agent_that_dies_while_a_process_is_saved_costs_the_checkpoint(
    toy_host: StartHost, tended: StartTender, data: Path, moment: str
) -> None:
    host = toy_host()
    tender = tended(host)
    state = tender.kernel.ask("work", 1)
    getattr(tender, moment)["Dump"] = host.kill_agent
    answer = tender.kernel.ask("checkpoint", "one")
    assert "was not made" in answer["error"]
    assert tender.kernel.ask("read") == state
    tender.wait_disconnected()
    tender.connect()
    tender.kernel.ask("work", 2)  # its worker died as well: its operators are replayed by then
    outcome = tender.kernel.ask("checkpoint", "two")
    assert outcome["forms"] == ["namespace", "process"], str(outcome)
    wait_until(lambda: images(data) == [])


def test_only_the_starter_of_a_kernel_manages_its_process(toy_host: StartHost) -> None:
    host = toy_host()
    with pytest.raises(ControlError, match="no session"):
        host.call(Tend("none"))


# ---------------------------------------------------------------- taking over


def test_the_process_of_a_checkpoint_takes_the_kernels_place(
    toy_host: StartHost, tended: StartTender, data: Path
) -> None:
    host = toy_host()
    tender = tended(host, name="lesson.ipynb")
    state = tender.kernel.ask("work", 1)
    tender.kernel.ask("checkpoint", "one")
    for number in range(3):
        before = tender.session
        later = tender.kernel.ask("work", 2 + number)
        assert later != state
        outcome = tender.kernel.ask("take_over", "one")
        assert outcome == {
            "checkpoint": "one", "variables": 1, "files": 0, "aside": {}, "problems": [],
        }  # fmt: skip
        tender.wait_for("Replace", 1 + number)
        assert tender.kernel.ask("read") == state
        assert tender.session != before
        wait_until(lambda: list(sessions(host)) == [tender.session])
        found = sessions(host)[tender.session]
        assert (found["name"], found["kernel_pid"]) == ("lesson.ipynb", tender.kernel.pid)
    wait_until(lambda: images(data) == [])
    tender.kernel.ask("work", 9)
    assert tender.kernel.ask("checkpoint", "two")["forms"] == ["namespace", "process"]
    host.call(DeleteCheckpoint("one"))
    tender.kernel.ask("work", 10)


def test_two_notebooks_go_on_from_one_checkpoint(toy_host: StartHost, tended: StartTender) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1")
    first = tended(host, device="cpu:0")
    state = first.kernel.ask("work", 1)
    first.kernel.ask("checkpoint", "one")
    first.kernel.ask("work", 2)
    other = tended(host, device="cpu:1", name="other")
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
    toy_host: StartHost, tended: StartTender
) -> None:
    host = toy_host()
    tender = tended(host)
    state = tender.kernel.ask("work", 1)
    tender.kernel.ask("checkpoint", "one")
    host.kill(host.agent_pid(), host.keeper_pid(), tender.kernel.pid)
    host = toy_host()
    other = tended(host)
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
    toy_host: StartHost, tended: StartTender
) -> None:
    host = toy_host()
    tender = tended(host)
    tender.kernel.ask("work", 1)
    tender.kernel.ask("checkpoint", "plain", "namespace")
    tender.kernel.ask("checkpoint", "one")
    found = opened(host, tender.session, "one")
    assert (found.form, found.why, found.parts, found.storages) == ("process", "", [], [])
    found = opened(host, tender.session, "one", "namespace")
    assert (found.form, found.parts) == ("namespace", [1])
    found = opened(host, tender.session, "plain")
    assert (found.form, found.why) == ("namespace", "")
    with pytest.raises(ControlError, match="but not the process"):
        opened(host, tender.session, "plain", "process")
    tender.disconnect()
    tender.wait_disconnected()
    wait_until(lambda: opened(host, tender.session, "one").why)
    found = opened(host, tender.session, "one")
    assert (found.form, found.parts) == ("namespace", [1])
    assert "not connected" in found.why
    assert opened(host, "", "one").form == "namespace"


@pytest.mark.parametrize("trouble", ["Revive", "Promise", "images", "gone"])
def test_an_image_that_cannot_be_restored_leaves_the_kernel_unchanged(
    toy_host: StartHost, tended: StartTender, data: Path, trouble: str
) -> None:
    host = toy_host()
    tender = tended(host)
    tender.kernel.ask("work", 1)
    tender.kernel.ask("checkpoint", "one")
    state = tender.kernel.ask("work", 2)
    if trouble in ("Revive", "Promise"):
        tender.refuse[trouble] = "its port is taken"
    elif trouble == "gone":
        tender.before["Revive"] = tender.disconnect
    else:
        (newest,) = data.glob("states/manifests/*-checkpoints/one.json")
        chunk = max(data.glob("states/chunks/*/*"), key=lambda path: path.stat().st_size)
        chunk.write_bytes(b"damaged")
        assert newest.exists()
    answer = tender.kernel.ask("take_over", "one")
    expected = {"gone": "not connected", "images": "damaged"}
    assert expected.get(trouble, "port is taken") in answer["error"]
    assert tender.kernel.ask("read") == state
    wait_until(lambda: tender.beside is None)
    wait_until(lambda: list(sessions(host)) == [tender.kernel.session])
    wait_until(lambda: images(data) == [])


def test_a_kernel_that_cannot_be_replaced_ends_with_a_reason(
    toy_host: StartHost, tended: StartTender, data: Path
) -> None:
    host = toy_host()
    tender = tended(host)
    tender.kernel.ask("work", 1)
    tender.kernel.ask("checkpoint", "one")
    tender.refuse["Replace"] = "the kernel does not answer"
    tender.kernel.ask("take_over", "one")
    wait_until(lambda: sessions(host) == {})
    wait_until(lambda: images(data) == [])


@pytest.mark.parametrize("moment", ["before it is told", "after it was told"])
def test_an_agent_that_dies_before_the_kernel_is_replaced_leaves_that_to_the_tender(
    toy_host: StartHost, tended: StartTender, data: Path, moment: str
) -> None:
    host = toy_host()
    tender = tended(host, name="lesson.ipynb")
    state = tender.kernel.ask("work", 1)
    tender.kernel.ask("checkpoint", "one")
    tender.kernel.ask("work", 2)
    before = tender.session

    def die() -> None:
        host.kill_agent()
        raise ConnectionError("the order never came")

    if moment == "before it is told":
        tender.after["Promise"] = die
        assert "error" in tender.kernel.ask("take_over", "one")
    else:
        tender.before["Replace"] = die
        assert tender.kernel.ask("take_over", "one")["checkpoint"] == "one"
    tender.wait_disconnected()
    assert tender.session != before
    tender.connect()
    assert tender.kernel.ask("read") == state
    wait_until(lambda: list(sessions(host)) == [tender.session])
    found = sessions(host)[tender.session]
    assert (found["name"], found["kernel_pid"]) == ("lesson.ipynb", tender.kernel.pid)
    wait_until(lambda: images(data) == [])
    tender.kernel.ask("work", 3)
    assert tender.kernel.ask("checkpoint", "two")["forms"] == ["namespace", "process"]


def test_closing_a_session_that_goes_on_from_a_checkpoint_does_not_touch_that(
    toy_host: StartHost, tended: StartTender
) -> None:
    host = toy_host()
    first = tended(host)
    state = first.kernel.ask("work", 1)
    first.kernel.ask("checkpoint", "one")
    for _ in range(2):
        other = tended(host)
        other.kernel.ask("take_over", "one")
        other.wait_for("Replace")
        assert other.kernel.ask("read") == state
        host.call(CloseSession(other.session))
    assert [each["name"] for each in host.call(CheckpointsRequest()).checkpoints] == ["one"]
