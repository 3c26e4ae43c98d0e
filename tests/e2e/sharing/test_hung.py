"""Real training runs continue, bit for bit, when a worker or kernel hangs or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import kernel, sessions
from tests.e2e.trainers import Program, program, session_of, status
from tests.integration.conftest import kill_at_once, lives

pytestmark = [pytest.mark.e2e]

#: This many steps take some seconds.
STEPS = 2000
FEW = 100
CELL = f"""
import torch
torch.manual_seed(5)
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(net.parameters())
batch = torch.randn(32, 64, device="cuda")
print("begun", flush=True)
for _ in range({STEPS}):
    loss = net(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(loss.item().hex())
"""


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:384MiB@1")
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")


def begin(trainer: Program, steps: int) -> int:
    """Start a training run; return its worker when it executes."""
    before = session_of(trainer)["operators"]
    trainer.ask(steps)
    wait_until(lambda: session_of(trainer)["operators"] > before + 100)
    return int(wait_until(lambda: session_of(trainer)["worker_pid"]))


def check_is_plain(seed: int, steps: int, answer: list[str]) -> None:
    assert len(answer) == steps
    with program(seed, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        assert plain.train(steps) == answer


def why(trainer: Program) -> str:
    command = [sys.executable, "-m", "jupyter_sing.cli", "why", trainer.session, "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return " ".join(each["reason"] for each in json.loads(said)["decisions"])


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_training_whose_worker_is_stopped_or_killed_lets_others_run_first(how: int) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(program(seed, proxied=True)) for seed in (1, 2))
        for each in (first, second):
            assert each.answer() == ["ready"]
        worker = begin(first, STEPS)
        os.kill(worker, how)
        there = second.train(FEW)
        here = first.answer()
        assert not lives(worker)
        if how == signal.SIGSTOP:
            wait_until(lambda: "was stopped by a signal" in why(first))
    check_is_plain(2, FEW, there)
    check_is_plain(1, STEPS, here)


def test_a_stopped_program_yields_its_device_and_continues_later() -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(program(seed, proxied=True)) for seed in (1, 2))
        for each in (first, second):
            assert each.answer() == ["ready"]
        worker = begin(first, STEPS)
        first.process.send_signal(signal.SIGSTOP)
        try:
            there = second.train(FEW)
            assert session_of(first)["worker_pid"] == worker  # it has quiesced
        finally:
            first.process.send_signal(signal.SIGCONT)
        here = first.answer()
    check_is_plain(2, FEW, there)
    check_is_plain(1, STEPS, here)


def test_a_program_that_is_killed_leaves_its_device() -> None:
    with program(2, proxied=True) as second:
        assert second.answer() == ["ready"]
        with program(1, proxied=True) as first:
            assert first.answer() == ["ready"]
            worker = begin(first, STEPS)
            second.ask(FEW)
            kill_at_once(first.process.pid)
            there = second.answer()
            wait_until(lambda: len(status().sessions) == 1)
            assert not lives(worker)
    check_is_plain(2, FEW, there)


def test_a_notebook_stopped_in_mid_cell_yields_its_device_and_continues_later() -> None:
    with kernel() as first, kernel() as second:
        cell = first.begin(CELL)
        assert first.finish(cell, lambda ran: "begun" in ran.stdout).stdout == "begun\n"
        found = next(each for each in sessions() if each["state"] == "running")
        os.kill(existing(found["kernel_pid"]), signal.SIGSTOP)
        try:
            there = second.run(CELL)
        finally:
            os.kill(existing(found["kernel_pid"]), signal.SIGCONT)
        here = first.finish(cell)
    assert (here.error, there.error) == ("", "")
    assert there.stdout == f"begun\n{here.stdout}"
