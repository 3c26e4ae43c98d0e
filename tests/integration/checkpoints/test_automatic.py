"""Automatic checkpoints, with toy workers and kernels that only receive requests for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.framing import send_message
from kernelproxy.common.protocol import (
    Carried,
    Checkpoint,
    CheckpointReply,
    CloseSession,
    DeleteCheckpoint,
    KernelRequest,
    LastCheckpoint,
    Listen,
    Restore,
    RestoreReply,
    Resume,
    SessionReply,
    SetAutomatic,
    Stop,
    StopReply,
    Suspend,
)
from kernelproxy.common.protocol.views import AutomaticView
from kernelproxy.kernel import activation
from kernelproxy.kernel.activation.agent_connection import Link
from tests.doubles.session.client import WAIT_SECONDS, ToyClient
from tests.doubles.waiting import wait_until
from tests.integration.checkpoints.test_checkpoints import hand_over, host_state, listed, take_out
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]


@pytest.fixture(autouse=True)
def _data(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))


class ReceivedRequests(list[KernelRequest]):
    """Requests for checkpoints that kernels of this process have received."""

    def next(self) -> KernelRequest:
        """Wait for a request, and remove it from the list."""
        wait_until(lambda: self)
        return self.pop(0)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> ReceivedRequests:
    found = ReceivedRequests()
    monkeypatch.setattr(activation.state, "on_request", found.append)
    return found


def fulfil(client: ToyClient | str, kernel_request: KernelRequest) -> str:
    """Make the requested checkpoint, as a kernel does; return its name."""
    session = client if isinstance(client, str) else client.session
    assert (kernel_request.verb, kernel_request.automatic) == ("checkpoint", True)
    hand_over(session, kernel_request.name, host_state(0, b"x"), b"x", automatic=True)
    return kernel_request.name


def run_cells(client: ToyClient, count: int = 1) -> None:
    for _ in range(count):
        with client.cell():
            pass


def automatic(host: ToyHost, client: ToyClient) -> AutomaticView:
    return host.session(client)["automatic"]


def names(host: ToyHost) -> set[str]:
    return {each["name"] for each in listed(host)}


def test_after_so_many_cells_one_is_made(toy_host: StartHost, requests: ReceivedRequests) -> None:
    host = toy_host()
    client = host.client("lessons/digits.ipynb", checkpoint_cells=3)
    made = []
    for _ in range(2):
        run_cells(client, 3)
        made.append(fulfil(client, requests.next()))
    assert all(name.startswith("lessons-digits-auto-2") for name in made)
    found = listed(host)
    assert [(each["name"], each["automatic"]) for each in found] == [(n, True) for n in made[::-1]]
    assert requests == []


def test_a_request_is_withdrawn_when_its_caller_disconnects(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    command = [sys.executable, "-m", "jupyter_sing.cli", "checkpoint", client.session, "one"]
    with client.cell(), subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.kill()
        kernel_request = requests.next()
    assert said.startswith("Waiting for toy. Running"), said
    assert (kernel_request.verb, kernel_request.name, kernel_request.withdrawn) == (
        "checkpoint",
        "one",
        False,
    )
    kernel_request = requests.next()
    assert (kernel_request.verb, kernel_request.name, kernel_request.withdrawn) == (
        "checkpoint",
        "one",
        True,
    )
    assert requests == []


def test_after_some_time_one_is_made_if_something_was_run(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client(checkpoint_every=0.05)
    idle = host.client("idle", checkpoint_every=0.05)
    for _ in range(3):
        run_cells(client)
        fulfil(client, requests.next())
    assert {each["session"] for each in listed(host)} == {"toy"}
    run_cells(idle)
    fulfil(idle, requests.next())
    assert requests == []


def test_a_failed_automatic_checkpoint_is_reported_and_retried(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client(checkpoint_every=0.05)
    run_cells(client)
    for _ in range(2):
        kernel_request = requests.next()
        host.call(
            Carried(client.session, kernel_request.verb, kernel_request.name, "The disk is full.")
        )
        wait_until(lambda: automatic(host, client)["problem"] == "The disk is full.")
    fulfil(client, requests.next())
    wait_until(lambda: automatic(host, client)["problem"] == "")


def test_a_session_that_is_to_be_suspended_is_saved_first(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client(idle_timeout=0.05, checkpoint_every=1e6)
    with client.cell():
        client.add(1)
    made = fulfil(client, requests.next())
    wait_until(lambda: host.when(client, "suspended"))
    assert names(host) == {made}
    assert requests == []


def test_a_session_that_was_suspended_is_not_brought_back(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client(checkpoint_cells=1)
    client.add(1)
    assert client.read() == client.state
    host.call(Suspend(client.session))
    run_cells(client, 2)
    wait_until(lambda: host.bells_were_received(client))
    assert host.when(client, "suspended")
    assert requests == []
    host.call(Resume(client.session))
    fulfil(client, requests.next())


def test_a_requested_checkpoint_resumes_a_suspended_session(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    """The kernel may need the device for it, and runs no cell meanwhile."""
    host = toy_host()
    client = host.client()
    with client.cell():
        client.add(1)
    assert client.read() == client.state
    host.call(Suspend(client.session))
    asking = Asking(host, Checkpoint(client.session, "mine"))
    assert requests.next().name == "mine"
    client.add(2)
    assert client.read() == client.state
    save_checkpoint(client.session, "mine")
    assert asking.answer().checkpoint["name"] == "mine"


def test_so_many_are_kept_and_all_that_were_made_by_hand(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client(checkpoint_cells=1, checkpoint_keep=2)
    other = host.client(checkpoint_cells=1, kernel_id="other")  # of the same name
    run_cells(other)
    kept = {fulfil(other, requests.next())}
    made = []
    for number in range(5):
        hand_over(client.session, f"mine-{number}", host_state(0, b"x"), b"x")
        run_cells(client)
        made.append(fulfil(client, requests.next()))
    by_hand = {f"mine-{number}" for number in range(5)}
    wait_until(lambda: names(host) == by_hand | kept | set(made[-2:]))


def test_a_manual_checkpoint_counts_and_is_never_replaced(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client(checkpoint_cells=2)
    run_cells(client)
    hand_over(client.session, "mine", host_state(0, b"x"), b"x")
    run_cells(client, 2)
    name = fulfil(client, requests.next())
    assert names(host) == {"mine", name}
    assert [each["automatic"] for each in listed(host)] == [True, False]


def test_settings_of_a_notebook_outlive_the_agent(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    client = host.client()
    reply = host.call(SetAutomatic(client.session, 0.0, 2))
    assert isinstance(reply, SessionReply)
    assert reply.session["automatic"] == {"every": 0.0, "cells": 2, "keep": 3, "problem": ""}
    run_cells(client)
    wait_until(lambda: host.bells_were_received(client))
    host.kill_agent()
    assert automatic(host, client)["cells"] == 2
    run_cells(client)
    fulfil(client, requests.next())
    host.call(SetAutomatic(client.session, 0.0, 0))
    assert automatic(host, client)["cells"] == 0


def test_a_kernel_that_has_not_attached_reports_and_receives(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    session = host.open(checkpoint_cells=2)
    link = Link(-1, Listen(session), paths.socket_path(), lambda: None)
    link.report_cells(1)  # before it is connected
    link.start()
    link.report_cells(2)
    fulfil(session, requests.next())
    host.kill_agent()
    link.report_cells(3)
    link.report_cells(4)
    fulfil(session, requests.next())
    link.report_cells(5)
    client = ToyClient(session)
    host.clients.append(client)
    link.end()
    run_cells(client)  # the fifth and the sixth
    fulfil(client, requests.next())
    with pytest.raises(ControlError, match="belongs to another process"):
        host.call(Listen(session))
    host.kill_agent()
    run_cells(client)
    wait_until(lambda: host.bells_were_received(client))
    assert requests == []
    run_cells(client)
    fulfil(client, requests.next())


class Asking:
    """Caller that waits for an answer in a thread."""

    def __init__(self, host: ToyHost, request: Any) -> None:
        self._host, self._request = host, request
        self.outcome: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._host.call(self._request)
        except ControlError as error:
            self.outcome = error

    def answer(self) -> Any:
        self._thread.join(WAIT_SECONDS)
        return self.outcome


def test_before_the_daemon_ends_notebooks_are_saved(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host(stop_seconds=WAIT_SECONDS)
    clients = {name: host.client(name) for name in ("good", "broken", "unused")}
    program = host.client("program", script=True)
    for client in (clients["good"], clients["broken"], program):
        run_cells(client)
    stopping = Asking(host, Stop(checkpoint=True))
    made = ""
    for _ in range(2):
        kernel_request = requests.next()
        if kernel_request.name.startswith("good-auto-"):
            made = fulfil(clients["good"], kernel_request)
        else:
            report = Carried(
                clients["broken"].session, kernel_request.verb, kernel_request.name, "It is broken."
            )
            host.call(report)
    assert stopping.answer() == StopReply([made], ["broken: It is broken."])
    assert requests == []
    again = toy_host()
    assert names(again) == {made}


def test_a_cell_that_runs_holds_the_end_up_for_a_while(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host(stop_seconds=0.1)
    run_cells(host.client("busy"))
    assert host.call(Stop(checkpoint=True)) == StopReply([], ["busy: it was busy for 0.1 s."])


def test_a_stop_without_checkpoints_ends_a_saving_daemon(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host(stop_seconds=WAIT_SECONDS)
    run_cells(host.client())
    patient = Asking(host, Stop(checkpoint=True))
    requests.next()
    assert host.call(Stop()) == StopReply([], [])
    assert patient.answer() == StopReply([], [])


def test_a_caller_that_disconnects_has_not_ended_the_daemon(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host(stop_seconds=WAIT_SECONDS)
    client = host.client()
    run_cells(client)
    with agent_client.connect(start=False).detach() as asking:
        send_message(asking, Stop(checkpoint=True))
        kernel_request = requests.next()
    made = fulfil(client, kernel_request)
    client.add(1)
    assert client.read() == client.state
    assert names(host) == {made}


def last_of(host: ToyHost, session: str) -> str:
    """Return the checkpoint that restores a session's notebook; its report has it, too."""
    (report,) = (each for each in host.status().sessions if each["id"] == session)
    if report["last_checkpoint"] is None:
        with pytest.raises(ControlError, match="There is no checkpoint of"):
            host.call(LastCheckpoint(session))
        return ""
    reply = host.call(LastCheckpoint(session))
    assert isinstance(reply, CheckpointReply)
    assert report["last_checkpoint"]["name"] == reply.checkpoint["name"]
    return str(reply.checkpoint["name"])


def save_checkpoint(session: str, name: str, *, automatic: bool = False) -> None:
    hand_over(session, name, host_state(0, b"x"), b"x", automatic=automatic)


def test_the_last_checkpoint_is_that_of_the_notebook(toy_host: StartHost) -> None:
    host = toy_host()
    here, there = "/a/digits.ipynb", "/b/digits.ipynb"
    first = host.open("digits.ipynb", notebook=here, kernel_id="k1")
    assert last_of(host, first) == ""
    save_checkpoint(first, "one")
    save_checkpoint(first, "two")
    assert last_of(host, first) == "two"
    namesake = host.open("digits.ipynb", notebook=there, kernel_id="k2")
    assert last_of(host, namesake) == ""
    host.call(CloseSession(first))
    again = host.open("digits.ipynb", notebook=here, kernel_id="k3")
    assert last_of(host, again) == "two"
    restarted = host.open("renamed.ipynb", notebook="/a/renamed.ipynb", kernel_id="k1")
    assert last_of(host, restarted) == "two"
    host.call(DeleteCheckpoint("two"))
    assert last_of(host, again) == "one"
    assert last_of(host, namesake) == ""


def test_the_checkpoint_of_a_dead_kernel_is_offered_until_settled(toy_host: StartHost) -> None:
    host = toy_host()

    def report(session: str) -> Any:
        (found,) = (each for each in host.status().sessions if each["id"] == session)
        return found["last_checkpoint"]

    first = host.open()
    save_checkpoint(first, "before")
    host.call(CloseSession(first, died=True))
    second = host.open()
    assert (report(second)["earlier"], report(second)["died"]) == (True, True)
    save_checkpoint(second, "since", automatic=True)
    assert last_of(host, second) == "before"
    save_checkpoint(second, "by-hand")
    assert last_of(host, second) == "by-hand"
    assert (report(second)["earlier"], report(second)["died"]) == (False, False)
    host.call(CloseSession(second))
    third = host.open()
    assert (report(third)["earlier"], report(third)["died"]) == (True, False)


def test_the_checkpoint_of_a_kernel_is_found_after_its_daemon_ended(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    here = "/a/digits.ipynb"
    first = host.open("digits.ipynb", notebook=here, kernel_id="k1")
    save_checkpoint(first, "one", automatic=True)
    save_checkpoint(first, "two", automatic=True)
    asked = LastCheckpoint(first, "k1", here)
    assert host.call(asked).checkpoint["name"] == "two"  # its session still exists
    host.end()
    host = toy_host()
    assert host.call(asked).checkpoint["name"] == "two"
    assert host.call(LastCheckpoint(first, "k1")).checkpoint["name"] == "two"
    with pytest.raises(ControlError, match="no checkpoint of its notebook"):
        host.call(LastCheckpoint("other", "k2", "/b/digits.ipynb"))
    second = host.open("digits.ipynb", notebook=here, kernel_id="k3")
    save_checkpoint(second, "of-another-kernel")
    assert host.call(asked).checkpoint["name"] == "two"


def test_a_kernel_whose_connection_ends_has_died_unless_that_was_wanted(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()

    def is_gone(session: str) -> bool:
        return session not in {each["id"] for each in host.status().sessions}

    for wanted in (False, True):
        client = host.client(kernel_id=f"k{wanted}")
        save_checkpoint(client.session, f"of-{wanted}")
        client.close()
        host.clients.remove(client)
        wait_until(partial(is_gone, client.session))
        if wanted:
            host.call(CloseSession(client.session))
        session = host.open(kernel_id=f"k{wanted}")
        (found,) = (each for each in host.status().sessions if each["id"] == session)
        assert found["last_checkpoint"] is not None
        assert found["last_checkpoint"]["died"] is not wanted


def test_restoring_settles_what_a_kernel_left_that_died(
    toy_host: StartHost, requests: ReceivedRequests
) -> None:
    host = toy_host()
    for number, restore in enumerate(("asked", "itself")):
        first = host.open(kernel_id=f"k{number}")
        save_checkpoint(first, f"before-{number}")
        host.call(CloseSession(first, died=True))
        client = host.client(kernel_id=f"k{number}")
        save_checkpoint(client.session, f"since-{number}", automatic=True)
        assert last_of(host, client.session) == f"before-{number}"
        if restore == "asked":
            asking = Asking(host, Restore(client.session, f"before-{number}"))
            kernel_request = requests.next()
            outcome: Any = {"checkpoint": "x"}
            host.call(
                Carried(client.session, kernel_request.verb, kernel_request.name, "", outcome)
            )
            assert asking.answer() == RestoreReply(outcome)
        else:
            take_out(f"before-{number}")
        assert last_of(host, client.session) == f"since-{number}"
