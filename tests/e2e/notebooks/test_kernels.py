"""Kernels under the provisioner: their sessions are opened, suspended, resumed and closed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Resume, SessionReply, Stop, Suspend
from kernelproxy.common.protocol.views import SessionView
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import kernel, sessions, wait_for_session, wait_for_sessions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _sing(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_SING_IDLE_TIMEOUT", "0.2")


def suspended(session: SessionView) -> bool:
    return session["state"] == "suspended"


@pytest.mark.usefixtures("_impatient")
def test_idle_kernel_is_suspended_and_resumed_by_the_next_cell() -> None:
    with kernel() as notebook:
        # Torch is imported in the middle of the cell, which counts as running all the same.
        notebook.run("import torch\ntorch.manual_seed(1)\na = torch.randn(1000, device='cuda')")
        notebook.run("expected = [a.sum().item(), torch.rand(3).tolist()]")
        resting = wait_for_session(suspended)
        assert resting["worker_pid"] is None
        assert resting["memory"] == 0
        assert "Resumes" in resting["reason"]
        ran = notebook.run("print(a.sum().item() == expected[0], a.device, torch.rand(3).device)")
        assert (ran.stdout, ran.error) == ("True cuda:0 cpu\n", "")


@pytest.mark.usefixtures("_impatient")
def test_running_cell_is_not_suspended(tmp_path: Path) -> None:
    with kernel() as notebook:
        cell = notebook.begin(
            "import os, time, torch\n"
            "a = torch.ones(3, device='cuda').cumsum(0)\n"
            "torch.cuda.synchronize()\n"
            "time.sleep(1.5)  # many times the timeout\n"
            "print('here', flush=True)\n"
            f"while not os.path.exists({str(tmp_path / 'seen')!r}): time.sleep(0.02)\n"
            "print(a.tolist())"
        )
        notebook.finish(cell, until=lambda ran: "here" in ran.stdout)
        (session,) = sessions()
        assert (session["state"], session["tier"]) == ("running", "resident")
        (tmp_path / "seen").touch()
        assert notebook.finish(cell).stdout == "[1.0, 2.0, 3.0]\n"
        wait_for_session(suspended)  # after the cell has ended


@pytest.mark.usefixtures("_impatient")
def test_interrupted_cell_counts_as_ended() -> None:
    with kernel() as notebook:
        notebook.run("import torch, time\na = torch.ones(3, device='cuda')")
        cell = notebook.begin("print('here', flush=True)\ntime.sleep(100)")
        notebook.finish(cell, until=lambda ran: "here" in ran.stdout)
        notebook.manager.interrupt_kernel()
        assert notebook.finish(cell).error == "KeyboardInterrupt"
        wait_for_session(suspended)


def test_cell_that_waits_for_the_device_can_be_interrupted() -> None:
    with kernel() as notebook:
        # A first addition: the first call of an operator waits until the worker is known to support
        # it.
        notebook.run("import torch\na = torch.ones(3, device='cuda')\n(a + 1).tolist()")
        session = wait_for_session(lambda found: found["worker_pid"] is not None)
        worker = existing(session["worker_pid"])
        called = Path(f"/proc/{worker}/cmdline").read_bytes().decode().rstrip("\0")
        assert called == f"sing: {session['owner']} {session['name']} {session['device']}"
        os.kill(worker, signal.SIGSTOP)  # busy for as long as it takes
        try:
            cell = notebook.begin("a = a + 1\nprint('issued', flush=True)\nprint(a.tolist())")
            notebook.finish(cell, until=lambda ran: "issued" in ran.stdout)
            notebook.manager.interrupt_kernel()
            assert notebook.finish(cell).error == "KeyboardInterrupt"
            (busy,) = sessions()
            assert busy["log_consumed"] < busy["log_head"]
        finally:
            os.kill(worker, signal.SIGCONT)
        assert notebook.run("print(a.tolist())").stdout == "[2.0, 2.0, 2.0]\n"


def test_daemon_rests_while_a_cell_waits_for_a_suspended_session() -> None:
    with kernel() as notebook:
        cell = notebook.begin(
            "import torch\na = torch.ones(3, device='cuda')\nprint(a.sum().item(), flush=True)\n"
            "while not input('go?'): pass\nprint('asks', flush=True); print(a.tolist())\n"
        )
        notebook.finish(cell, until=lambda ran: "3.0" in ran.stdout)
        (session,) = sessions()
        with agent_client.connect(start=False) as connection:
            connection.expect(SessionReply, Suspend(session["id"], "a test"), timeout=60)
            notebook.client.input("go")
            notebook.finish(cell, until=lambda ran: "asks" in ran.stdout)
            waiting = wait_for_session(lambda found: found["log_head"] > session["log_head"])
            assert waiting["state"] == "suspended"
            # Wait until earlier work has settled; a process that polls is never idle for a second.
            wait_until(lambda: rests(connection.daemon_pid))
            connection.expect(SessionReply, Resume(session["id"]), timeout=60)
        assert notebook.finish(cell).stdout == "[1.0, 1.0, 1.0]\n"


def rests(pid: int) -> bool:
    """True if a process is nearly idle for a second."""
    before = processor_seconds(pid)
    threading.Event().wait(1.0)
    return processor_seconds(pid) - before < 0.1


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_restart_replaces_the_session_and_shutdown_closes_it() -> None:
    with kernel() as notebook:
        notebook.run("import torch\na = torch.ones(10, device='cuda')")
        (first,) = sessions()
        notebook.restart()
        (second,) = sessions()
        assert second["id"] != first["id"]
        assert notebook.run("import os; print(os.environ['SING_SESSION'])").stdout == (
            second["id"] + "\n"
        )
        assert notebook.run("a").error == "NameError"
    assert sessions() == []


def test_killed_kernel_leaves_no_session() -> None:
    with kernel() as notebook:
        notebook.run("import torch\na = torch.ones(10, device='cuda')")
        (session,) = sessions()
        os.kill(existing(session["kernel_pid"]), signal.SIGKILL)
        wait_for_sessions(lambda found: found == [])


def test_children_of_a_kernel_have_no_part_in_its_session() -> None:
    with kernel() as notebook:
        notebook.run("import sys, subprocess, torch\na = torch.ones(2, device='cuda')")
        code = "import torch; print(torch.cuda.is_available())"
        ran = notebook.run(f"print(subprocess.check_output([sys.executable, '-c', {code!r}]))")
        assert ran.stdout == "b'True\\n'\n"
        ran = notebook.run(
            "import multiprocessing\n"
            "def work(send):\n"
            "    try:\n"
            "        send.send(str(torch.ones(1, device='cuda')))\n"
            "    except RuntimeError as error:\n"
            "        send.send(str(error))\n"
            "receive, send = multiprocessing.Pipe()\n"
            "child = multiprocessing.get_context('fork').Process(target=work, args=(send,))\n"
            "child.start(); print(receive.recv()); child.join()\n"
            "print(a.tolist())"
        )
        assert ran.stdout.startswith("tensor([1.], device='cuda:0')")
        assert ran.stdout.endswith("[1.0, 1.0]\n")


def test_torch_without_the_daemon_is_unchanged() -> None:
    with kernel() as notebook:
        with agent_client.connect(start=False) as connection:
            connection.call(Stop())
        ran = notebook.run("import torch\nprint(torch.cuda.is_available(), torch.ones(2).sum())")
        assert ran.stdout == "False tensor(2.)\n"
        assert ran.stderr.startswith("jupyter_sing: CPU only: ")
        assert ran.stderr.count("\n") == 1
        ran = notebook.run("%sing status")
        assert (ran.stdout.startswith("CPU only: "), ran.stderr) == (True, "")


def test_kernel_without_torch_has_no_worker() -> None:
    with kernel() as notebook:
        assert notebook.run("print(6 * 7)").stdout == "42\n"
        (session,) = sessions()
        assert session["worker_pid"] is None


def test_next_execution_resumes_a_paused_cell(tmp_path: Path) -> None:
    gate = tmp_path / "go-on"
    with kernel() as notebook:
        notebook.run("import os, time, torch\na = torch.ones(2, device='cuda')\nprint(a.sum())")
        first = notebook.begin(
            "print('begun', flush=True)\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
            "print((a + 1).tolist())"
        )
        notebook.finish(first, lambda ran: "begun" in ran.stdout)
        with agent_client.connect(start=False) as connection:
            (session,) = sessions()
            connection.call(Suspend(session["id"]))
        gate.touch()
        second = notebook.begin("print('second')")
        assert notebook.finish(first).stdout == "[2.0, 2.0]\n"
        assert notebook.finish(second).stdout == "second\n"


def test_magic_prints_one_line() -> None:
    with kernel() as notebook:
        notebook.run("import torch\na = torch.ones(2, device='cuda')")
        assert (
            notebook.run("%sing suspend").stdout
            == "Suspended by %sing suspend. Resumes when you run the next cell.\n"
        )
        (session,) = sessions()
        assert (session["state"], session["worker_pid"]) == ("suspended", None)
        assert notebook.run("%sing suspend").error == ""  # idempotent
        assert notebook.run("%sing resume").stdout.startswith("Resumed on Simulated GPU 0. ")
        ran = notebook.run("%sing nonsense")
        assert (ran.stdout, ran.error, ran.stderr.count("\n")) == ("", "", 1)
