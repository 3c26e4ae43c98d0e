"""Trainings by several ranks, with a daemon that has a number of devices."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Stop
from tests.e2e.kernels import sessions
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import kill_at_once

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "programs" / "jobs" / "ranks.py"
RANKS = 4
STEPS = 12

#: Called after each step of rank 0.
Trouble = Callable[[int], object]


@contextlib.contextmanager
def training(
    model: str, steps: int, seed: int, ranks: int, pace: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, str(PROGRAM), model, str(steps), str(seed), *([str(pace)] if pace else [])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def weights(
    model: str, devices: int, monkeypatch: pytest.MonkeyPatch, trouble: Trouble | None = None,
    *, steps: int = STEPS, seed: int = 1, ranks: int = RANKS, pace: Path | None = None,
    checks: bool = True,
) -> str:  # fmt: skip
    """Train with a daemon that has so many devices; return the hash of the ranks' weights.

    `trouble` is called after each step of rank 0; `pace`: see `ranks.py`. If it `checks`, what a
    rank did not execute or copy is compared with what that would give.
    """
    monkeypatch.setenv("SING_CHECK_SPLICING", str(int(checks)))
    monkeypatch.setenv("JUPYTER_SING_DEVICES", ",".join(["cpu:1GiB@1"] * devices))
    found = []
    with training(model, steps, seed, ranks, pace) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("rank 0 step ") and trouble is not None:
                trouble(int(line.split()[-1]))
            elif "weights" in line:
                found.append(line.split()[-1])
        errors = process.communicate()[1]
        assert process.returncode == 0, errors[-3000:]
    assert len(found) == ranks, errors[-3000:]
    assert len(set(found)) == 1, found
    return str(found[0])


def stop() -> None:
    """Stop the daemon: the next one has other devices."""
    with contextlib.suppress(ControlError), agent_client.connect(start=False) as connection:
        connection.call(Stop(), timeout=60)


class Kills:
    """Kills random workers of the job every few steps, and perhaps the agent at one step."""

    def __init__(
        self, seed: int, every: int = 2, agent_at: int | None = None, first: int = 0
    ) -> None:
        self._chance, self._every, self._agent_at = random.Random(seed), every, agent_at
        self._first = first
        self.count = 0

    def __call__(self, step: int) -> None:
        if step < self._first or step % self._every:
            return
        alive = [each["worker_pid"] for each in sessions() if each["worker_pid"]]
        for pid in self._chance.sample(alive, min(2, len(alive))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.count += 1
        if step == self._agent_at:
            kill_at_once(agent_pid())
