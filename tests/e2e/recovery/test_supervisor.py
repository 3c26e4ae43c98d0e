"""Kernels outlive the agent: with their device, or, if the supervisor ends too, as plain Python."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import kernel, sessions, wait_for_session
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import kill_at_once, lives, supervisor_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRAIN = """\
import torch
torch.manual_seed(3)
net = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.Adam(net.parameters())
def train(steps):
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(8, 16, device='cuda')).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item().hex())
    return losses
"""


@pytest.fixture(autouse=True)
def _sing(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1")


def test_a_notebook_trains_on_while_the_agent_dies() -> None:
    with kernel() as notebook:
        notebook.run(TRAIN)
        expected = notebook.run("print(*train(60), sep='\\n')").stdout.split()
    assert len(expected) == 60
    with kernel() as notebook:
        notebook.run(TRAIN)
        got = notebook.run("print(*train(20), sep='\\n')").stdout.split()
        kill_at_once(agent_pid())  # between two cells
        cell = notebook.begin("for _ in range(40): print(*train(1), flush=True)")
        ran = notebook.finish(cell, until=lambda ran: ran.stdout.count("\n") >= 10)
        kill_at_once(agent_pid())  # while one runs
        rest = notebook.finish(cell)
        assert (rest.error, rest.stderr) == ("", "")
        got += (ran.stdout + rest.stdout).split()
        assert notebook.run("%sing suspend").stdout.startswith("Suspended")
        kill_at_once(agent_pid())
        (session,) = sessions()
        assert (session["state"], session["worker_pid"]) == ("suspended", None)
        assert notebook.run("%sing resume").stdout.startswith("Resumed on Simulated GPU 0. ")
    assert got == expected
    assert sessions() == []


def test_torch_is_imported_under_another_agent_than_the_kernel_began_with() -> None:
    with kernel() as notebook:
        kill_at_once(agent_pid())
        ran = notebook.run("import torch; print(torch.ones(3, device='cuda').sum().item())")
        assert (ran.stdout, ran.stderr) == ("3.0\n", "")


def test_waiting_for_the_next_agent_can_be_interrupted() -> None:
    with kernel() as notebook:
        notebook.run("import torch\na = torch.ones(3, device='cuda')\na.tolist()")
        session = wait_for_session(lambda found: found["worker_pid"] is not None)
        worker = existing(session["worker_pid"])
        agent = agent_pid()
        supervisor = supervisor_of(agent)
        os.kill(supervisor, signal.SIGSTOP)
        kill_at_once(agent)
        wait_until(lambda: not lives(worker))  # it still answers before
        cell = notebook.begin("print('here', flush=True)\nfor _ in range(3): print(a.sum().item())")
        notebook.finish(cell, until=lambda ran: "here" in ran.stdout)
        notebook.manager.interrupt_kernel()
        assert notebook.finish(cell).error == "KeyboardInterrupt"
        os.kill(supervisor, signal.SIGCONT)
        assert notebook.run("print(a.tolist())").stdout == "[1.0, 1.0, 1.0]\n"


def test_without_agent_and_supervisor_a_kernel_keeps_its_python() -> None:
    with kernel() as notebook:
        notebook.run("import torch\na = torch.ones(3, device='cuda')\nmine = a.sum().item()")
        session = wait_for_session(lambda found: found["worker_pid"] is not None)
        worker = existing(session["worker_pid"])
        agent = agent_pid()
        kill_at_once(agent, supervisor_of(agent))
        wait_until(lambda: not lives(worker))  # it still answers before
        ran = notebook.run("a.sum().item()")
        assert ran.error in ("RuntimeError", "AcceleratorError")
        assert "the device daemon of jupyter_sing is gone" in ran.error_text
        assert ran.error_text.count("\n") == 0
        assert notebook.run("print(mine, torch.ones(2).sum().item())").stdout == "3.0 2.0\n"
        notebook.restart()  # and has a device again, of a new daemon
        assert notebook.run("import torch; print(torch.ones(2).cuda().sum().item())").stdout == (
            "2.0\n"
        )
