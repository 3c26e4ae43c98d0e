"""Programs that continue to train while they are migrated between devices repeatedly."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproxy.agent.residency.worker_start import START_ATTEMPTS_MAX
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import MigrateRequest
from tests.doubles.waiting import wait_until
from tests.e2e.trainers import agent_pid, program, status, verb
from tests.integration.conftest import children_of, lives

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MIGRATIONS = 100
DEATHS = 25
AGENT_DEATHS = 3


@pytest.fixture(autouse=True)
def _two_devices(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:2GiB@1,cpu:2GiB@1")


class Trouble:
    """Context manager that kills workers and agents at random moments.

    A session that fails to start repeatedly is given up. Therefore it spares the workers of a
    session that has made no progress since its last few deaths, as `progress` counts it.
    """

    def __init__(self, chance: random.Random, progress: Callable[[], int]) -> None:
        self.workers = self.agents = 0
        self._chance, self._done = chance, threading.Event()
        self._progress, self._seen, self._in_a_row = progress, -1, 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Trouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._chance.uniform(0.0, 0.8)):
            if self.agents < AGENT_DEATHS and self._chance.random() < 0.1:
                self._kill_agent()
            elif self.workers < DEATHS and not self._makes_no_progress():
                self._kill_worker()

    def _makes_no_progress(self) -> bool:
        seen = self._progress()
        if seen != self._seen:
            self._seen, self._in_a_row = seen, 0
        return self._in_a_row >= START_ATTEMPTS_MAX // 2

    def _kill_agent(self) -> None:
        agent = agent_pid()
        os.kill(agent, signal.SIGKILL)
        self.agents += 1
        wait_until(lambda: not lives(agent))

    def _kill_worker(self) -> None:
        """Kill a random worker, of the source or of the target."""
        workers = [pid for zygote in children_of(agent_pid()) for pid in children_of(zygote)]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self._chance.choice(workers), signal.SIGKILL)
            self.workers += 1
            self._in_a_row += 1


@pytest.mark.parametrize(
    "killing",
    [
        pytest.param(False, id="peace", marks=pytest.mark.exhaustive),
        pytest.param(True, id="trouble"),
    ],
)
def test_a_hundred_migrations_change_no_loss(killing: bool) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    moved = refused = 0
    losses: list[str] = []
    with program(0, proxied=True, device="cpu:0") as proxied:
        assert proxied.answer() == ["ready"]
        training = threading.Event()
        training.set()

        def train() -> None:
            while training.is_set():
                losses.extend(proxied.train(20))

        losses += proxied.train(1)
        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            trouble = Trouble(chance, lambda: len(losses)) if killing else contextlib.nullcontext()
            with trouble:
                while moved + refused < MIGRATIONS:
                    target = f"cpu:{(moved + 1) % 2}"
                    try:
                        found = verb(MigrateRequest(proxied.session, target))
                    except ControlError:
                        refused += 1
                        continue
                    assert found["device"] == target
                    moved += 1
        finally:
            training.clear()
            trainer.join()
        losses += proxied.train(5)
        (session,) = status().sessions
        assert session["state"] in ("idle", "running"), session["reason"]
    assert moved > MIGRATIONS // 2
    assert killing or not refused
    with program(0, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        assert plain.train(len(losses)) == losses, f"seed {seed}"
