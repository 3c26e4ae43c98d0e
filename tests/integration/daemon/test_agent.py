"""Sessions under a real daemon: suspended, resumed, killed and closed, with toy workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from jupyter_sing.cli import commands
from jupyter_sing.notebook import status_text
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import (
    CloseSession,
    OpenSession,
    OpenSessionReply,
    Prepare,
    Resume,
    StatusRequest,
    Suspend,
)
from kernelproxy.common.protocol.views import SessionView
from tests.doubles.daemon.zygote import step
from tests.doubles.session.client import ToyClient
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost, from_outside, lives

MIB = 1 << 20
StartHost = Callable[..., ToyHost]


def test_a_session_starts_at_its_first_record(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    before = host.session(client)
    assert (before["state"], before["worker_pid"], before["memory"]) == ("idle", None, 0)
    client.add(1)
    client.add(2)
    assert client.read() == client.state
    after = host.rested(client)
    assert after["worker_pid"] in host.children()
    assert (after["tier"], after["operators"]) == ("resident", 2)
    assert after["kernel_pid"] == os.getpid()
    assert after["gpu_seconds"] > 0


def test_a_session_runs_while_a_cell_runs(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    with client.cell():
        client.read()
        wait_until(lambda: host.when(client, "running"))
    host.rested(client)


# -------------------------------------------------------------------- idle suspension


def test_an_idle_session_is_suspended_and_comes_back_by_itself(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0.2)
    client = host.client()
    client.use(10 * MIB)
    client.add(1)
    assert client.read() == client.state
    worker = existing(host.session(client)["worker_pid"])
    suspended = wait_until(lambda: host.when(client, "suspended"))
    assert (suspended["worker_pid"], suspended["memory"], suspended["tier"]) == (None, 0, "parked")
    assert suspended["reason"] == "Not used for 0.2 seconds. Resumes when you run a cell."
    assert not lives(worker)
    assert host.status().devices[0]["memory_used"] == 0
    with client.cell():
        client.add(2)
        assert client.read() == client.state
        assert wait_until(lambda: host.session(client)["memory"]) == 10 * MIB


def test_a_running_cell_is_no_idleness(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0.1)
    busy, idle = host.client("busy"), host.client("idle")
    for client in (busy, idle):
        client.add(1)
    with busy.cell():
        busy.read()
        idle.read()
        wait_until(lambda: host.when(idle, "suspended"))
        assert host.session(busy)["state"] == "running"
    wait_until(lambda: host.when(busy, "suspended"))


def test_a_session_may_have_its_own_idle_timeout(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0.1)
    never, soon = host.client(idle_timeout=0), host.client()
    for client in (never, soon):
        client.add(1)
        client.read()
    wait_until(lambda: host.when(soon, "suspended"))
    host.rested(never)


# -------------------------------------------------------------------- suspension on request


def test_suspending_and_resuming_are_idempotent(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    for _ in range(2):
        reply = host.call(Suspend(client.session, "You asked for it."))
        assert (reply.session["state"], reply.session["worker_pid"]) == ("suspended", None)
        assert reply.session["reason"] == "You asked for it. Resumes when you run the next cell."
    for _ in range(2):
        reply = host.call(Resume(client.session))
        assert reply.session["state"] in ("running", "idle")
        assert reply.session["worker_pid"] is not None
    assert client.read() == client.state


def test_an_unused_session_can_be_suspended(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    assert host.call(Suspend(client.session)).session["state"] == "suspended"
    client.add(1)
    assert client.read() == client.state


def test_a_held_session_waits_for_the_next_cell(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with client.cell():
        client.add(1)
        client.read()
        from_outside(Suspend(client.session))
        client.add(2)
        with pytest.raises(TimeoutError):
            client.read(0.3)
        assert "run anything" in host.session(client)["reason"]
    client.add(3)  # a thread, or the garbage collector, between cells
    host.status()
    assert host.session(client)["state"] == "suspended"
    with client.cell():
        client.add(4)
        assert client.read() == client.state


def test_a_session_paused_in_mid_cell_names_the_user_and_resumes_on_any_run(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    client = host.client()
    before = time.time() - 60  # to the minute
    with client.cell():
        client.add(1)
        client.read()
        from_outside(Suspend(client.session, "Suspended by an impostor"))
        found = host.session(client)
        said = re.fullmatch(
            rf"Paused by {found['owner']}, (\S+), in the middle of a cell\. "
            r"Resumes when you run anything\.",
            found["reason"],
        )
        assert said is not None, found["reason"]
        assert before < datetime.fromisoformat(said[1]).timestamp() < time.time()
        assert found["suspended_by"] == found["owner"]
        assert found["suspended_at"] is not None
        assert before < datetime.fromisoformat(found["suspended_at"]).timestamp() < time.time()
        client.add(2)
        client.link.report_cell_request()  # the user has run another cell, which waits for this one
        assert client.read() == client.state
        found = host.session(client)
        assert (found["suspended_by"], found["suspended_at"]) == (None, None)
        from_outside(Suspend(client.session))
    # It ended without the device, as after an interrupt.
    after = rf"Suspended by {found['owner']}, \S+\. Resumes when you run the next cell\."
    wait_until(lambda: re.fullmatch(after, host.session(client)["reason"]))


def test_a_held_session_comes_back_by_resume_in_the_middle_of_a_cell(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with client.cell():
        client.add(1)
        from_outside(Suspend(client.session))
        client.add(2)
        from_outside(Resume(client.session))
        assert client.read() == client.state


def test_a_cell_that_suspends_itself_stays_suspended_after_its_end(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with client.cell():
        client.add(1)
        host.call(Suspend(client.session))  # from the kernel's own process
        client.add(2)  # such as the end of a temporary
    wait_until(lambda: host.bells_were_received(client))
    assert host.session(client)["state"] == "suspended"
    with client.cell():
        client.add(3)
        assert client.read() == client.state


def test_a_cell_that_suspended_itself_does_not_wait_for_itself(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with client.cell():
        client.add(1)
        host.call(Suspend(client.session))
        assert client.read() == client.state


# -------------------------------------------------------------------- the log


def test_a_log_many_times_its_size_passes_through(toy_host: StartHost) -> None:
    host = toy_host(log_bytes=1 << 16, log_budget=1 << 15)
    client = host.client()
    for number in range(20_000):
        client.add(number)
    assert client.read() == client.state
    assert client.agent.snapshots > 5
    assert client.agent.retained > 1 << 18
    assert host.session(client)["log_bytes"] <= 1 << 16


# -------------------------------------------------------------------- permissions


def test_a_session_is_found_by_id_prefix_and_name(toy_host: StartHost) -> None:
    host = toy_host()
    one, two, other = host.open("same"), host.open("same"), host.open("other")
    for name in (other, other[:11], "other"):
        assert host.call(Suspend(name)).session["id"] == other
    with pytest.raises(ControlError, match="Several sessions match") as ambiguous:
        host.call(Suspend("same"))
    assert ambiguous.value.reason == "ambiguous"
    assert one in str(ambiguous.value)
    assert two in str(ambiguous.value)
    for name in ("", "nobody"):
        with pytest.raises(ControlError, match="There is no session") as unknown:
            host.call(Suspend(name))
        assert unknown.value.reason == "unknown-session"


def test_a_session_has_one_kernel(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with pytest.raises(ControlError, match="belongs to another process") as refused:
        ToyClient(client.session)
    assert refused.value.reason == "already-attached"


def test_a_kernel_with_another_torch_gets_an_error(toy_host: StartHost) -> None:
    host = toy_host()
    session = host.open()
    with pytest.raises(ControlError, match=r"has torch 2.11.0, its environment 2.13.0\+toy"):
        ToyClient(session, "2.11.0")
    with ToyClient(session) as client:  # it may retry
        client.add(1)
        assert client.read() == client.state


def test_an_environment_without_a_zygote_is_refused_at_once(toy_host: StartHost) -> None:
    host = toy_host(zygote_command=["-c", "import sys; sys.exit('no torch')"])
    with pytest.raises(ControlError, match="could not start workers") as refused:
        ToyClient(host.open())
    assert refused.value.reason == "unavailable"


def test_a_compilation_reports_its_progress(
    toy_host: StartHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    hold = os.open(gate, os.O_RDWR)
    compiles = (
        "import runpy, socket, sys\n"
        "from kernelproxy.common.ipc import framing as frames\n"
        "from kernelproxy.common import protocol\n"
        f"agent, gate = socket.socket(fileno=int(sys.argv[1])), open({str(gate)!r})\n"
        "for done in (12, 13):\n"
        "    frames.send_message(agent, protocol.Compiled('2.13', done, 58)); gate.readline()\n"
        "agent.detach(); runpy.run_module('tests.doubles.daemon.zygote', run_name='__main__')"
    )
    host = toy_host(zygote_command=["-c", compiles])
    session = host.open()
    host.call(Prepare(sys.executable))

    def told() -> SessionView:
        (found,) = host.status().sessions
        return found

    for done in (12, 13):
        word = f"Preparing, {done} of 58"
        wait_until(lambda word=word: status_text.state_word(told()) == word)  # type: ignore[misc]
        sentence = f"Compiling GPU support for torch 2.13 (first use only), {done} of 58."
        assert (told()["state"], told()["reason"]) == ("preparing", sentence)
        assert commands.main(["why", session]) == 0
        assert capsys.readouterr().out.split()[:2] == ["now", "Preparing,"]
        os.write(hold, b"go on\n")
    with ToyClient(session) as client:
        client.add(1)
        assert client.read() == client.state
        assert told()["progress"] is None
    os.close(hold)


@pytest.mark.parametrize("said", ["'2.13', 59, 58", "'2.13\\x1b[2J', 1, 2", "'', -1, 2"])
def test_reports_of_a_zygote_are_validated(toy_host: StartHost, said: str) -> None:
    claims = (
        "import socket, sys\n"
        "from kernelproxy.common.ipc import framing as frames\n"
        "from kernelproxy.common import protocol\n"
        "agent = socket.socket(fileno=int(sys.argv[1]))\n"
        f"frames.send_message(agent, protocol.Compiled({said})); agent.recv(1)"
    )
    host = toy_host(zygote_command=["-c", claims])
    with pytest.raises(ControlError, match="A zygote"):
        ToyClient(host.open())


def test_a_missing_interpreter_is_refused_at_once(toy_host: StartHost) -> None:
    host = toy_host()
    host.call(Prepare("/nonexistent/python"))
    with agent_client.connect(start=False) as connection:
        opened = connection.expect(OpenSessionReply, OpenSession("n", "", "/nonexistent/python"))
    with pytest.raises(ControlError, match="No such file"):
        ToyClient(opened.session)


def test_an_unknown_device_is_refused(toy_host: StartHost) -> None:
    host = toy_host()
    with pytest.raises(ControlError, match="There is no device cuda:7, only cpu:0"):
        host.open(device="cuda:7")


def test_sessions_are_spread_over_the_devices(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB,cpu:1GiB")
    for _ in range(4):
        host.open()
    assert [len(each["sessions"]) for each in host.status().devices] == [2, 2]


# -------------------------------------------------------------------- ends


def test_a_session_ends_with_its_kernel(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    worker = existing(host.session(client)["worker_pid"])
    client.close()
    host.clients.clear()
    wait_until(lambda: not host.status().sessions)
    assert not lives(worker)


def test_a_session_ends_with_its_kernel_though_children_hold_its_socket(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    session = host.open()
    program = (
        "import os, sys, subprocess; from tests.doubles.session.client import ToyClient\n"
        f"client = ToyClient({session!r}); client.add(1); client.read()\n"
        "subprocess.Popen(['sleep', '30'], pass_fds=[client.sock.fileno()]);"
        "print('attached', flush=True); sys.stdin.read()"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == b"attached\n"
    kernel.kill()
    wait_until(lambda: not host.status().sessions)
    os.killpg(kernel.pid, signal.SIGKILL)
    kernel.communicate()


def test_a_session_whose_kernel_never_started_ends_with_its_opener(toy_host: StartHost) -> None:
    host = toy_host()
    from_outside(OpenSession("never", "", sys.executable))
    wait_until(lambda: not host.status().sessions)


def test_closing_is_idempotent(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.append("hang")
    for _ in range(2):
        host.call(CloseSession(client.session))
    assert not host.status().sessions
    with pytest.raises(RuntimeError, match="Closed on request"):
        client.read()


def test_two_hundred_sessions_leave_nothing_behind(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB", idle_timeout=0)
    with ToyClient(host.open()) as client:
        host.work(client)
    wait_until(lambda: len(host.children()) == 1)  # the worker was reaped, too
    before, family = host.fds(), host.children()
    for _ in range(20):
        clients = [ToyClient(host.open()) for _ in range(10)]
        for number, client in enumerate(clients):
            client.add(number)
            assert client.read() == step(0, number)
        host.call(Suspend(clients[0].session))
        host.call(Suspend(clients[1].session))
        host.call(Resume(clients[1].session))
        host.call(CloseSession(clients[2].session))
        for client in clients:
            client.close()
        wait_until(lambda: not host.status().sessions)
    wait_until(lambda: host.children() == family)
    wait_until(lambda: len(host.fds()) <= len(before))


def test_the_daemon_survives_what_is_no_message(toy_host: StartHost) -> None:
    host = toy_host()
    for noise in (b"\xff" * 100, b"\x02\0\0\0{}", b"\x05\0\0\0", b""):
        with agent_client.connect(start=False).detach() as sock:
            sock.sendall(noise)
    assert host.call(StatusRequest()).sessions == []
