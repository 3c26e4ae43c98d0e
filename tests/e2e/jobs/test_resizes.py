"""The weights of a job are the same bits for every history of its number of devices."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sharing.jobs import SING
from benchmarks.sharing.resizing import Occupants, devices_of_job
from tests.e2e.jobs.trained import RANKS, Kills, stop, weights
from tests.programs.jobs.ranks import STEPS_TOGETHER

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 50
FEW_STEPS = 25
DEATHS = 100
LATER = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


class Resizes:
    """Gives the job a random number of devices after every few steps of rank 0, which waits then.

    Parameters
    ----------
    seed : int
    others : Occupants
        Keep the devices that the job is not to have.
    pace : int
        A byte there lets rank 0 continue.
    """

    def __init__(self, seed: int, others: Occupants, pace: int) -> None:
        self._chance, self._others, self._pace = random.Random(seed), others, pace
        self.seen: list[int] = []

    def __call__(self, step: int) -> None:
        if (step + 1) % STEPS_TOGETHER:
            return
        self._others.settle()
        self.seen.append(len(devices_of_job()))
        kept = set(range(self._chance.choice((1, 2, 4)), RANKS))
        while_it_trains = self._chance.random() < 0.5
        if while_it_trains:
            os.write(self._pace, b"\n")
        self._others.keep(kept)
        if not while_it_trains:
            self._others.settle()
            os.write(self._pace, b"\n")


@contextlib.contextmanager
def resizing(seed: int, directory: Path) -> Iterator[tuple[Resizes, Path]]:
    """Yield `Resizes`, and the pipe of the training's pace."""
    # Growth comes without notice, or is prepared.
    pause = "1 s" if seed % 2 else "0 s"
    (policy := directory / "policy.yaml").write_text(f"jobs: {{grow_after: {pause}}}\n")
    os.mkfifo(pipe := directory / "pace")
    pace = os.open(pipe, os.O_RDWR)
    try:
        with Occupants(range(1, RANKS)) as others:
            subprocess.run([*SING, "policy", "apply", str(policy)], check=True)
            yield Resizes(seed, others, pace), pipe
    finally:
        os.close(pace)


@pytest.mark.parametrize(
    ("model", "seed"),
    [
        pytest.param(model, seed, marks=() if (model, seed) == ("mlp", 1) else LATER)
        for model in ("mlp", "resnet", "gpt2", "fsdp2")
        for seed in (1, 2, 3, 4, 5)
    ],
)
def test_resizes_do_not_show_in_the_weights(
    model: str, seed: int, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = weights(model, RANKS, monkeypatch, steps=STEPS, seed=seed)
    stop()
    with resizing(seed, tmp_path) as (resizes, pace):
        found = weights(model, RANKS, monkeypatch, resizes, steps=STEPS, seed=seed, pace=pace)
    assert found == undisturbed
    assert len(set(resizes.seen)) > 1


def test_deaths_after_resizes_do_not_show_in_the_weights(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = weights("mlp", RANKS, monkeypatch, steps=FEW_STEPS)
    stop()
    # Ranks move once without deaths before: those that were rebuilt share little.
    kills = Kills(1, every=STEPS_TOGETHER, first=2 * STEPS_TOGETHER)
    with resizing(2, tmp_path) as (resizes, pace):

        def trouble(step: int) -> None:
            kills(step)  # soon after the resize, before there is a snapshot of all bytes
            resizes(step)

        found = weights(
            "mlp", RANKS, monkeypatch, trouble, steps=FEW_STEPS, seed=1, pace=pace, checks=False
        )
    assert found == undisturbed
    assert kills.count >= FEW_STEPS // STEPS_TOGETHER
    log = next(runtime_dir.rglob("agent.log")).read_text()
    kept = re.findall(r"where it finds (\d+) storages", log)
    assert sum(map(int, kept)) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_hundred_deaths_do_not_show_in_the_weights(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = Kills(1, every=1)
    undisturbed = weights("mlp", 2, monkeypatch, steps=DEATHS)
    stop()
    assert weights("mlp", 2, monkeypatch, kills, steps=DEATHS) == undisturbed
    assert kills.count >= DEATHS
