"""The weights of a job are the same bits for every history of its number of devices."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from benchmarks.sharing.jobs import SING
from benchmarks.sharing.resizing import Occupants, devices_of_job
from tests.e2e.jobs.trained import RANKS, Kills, stop, weights
from tests.programs.jobs.ranks import STEPS_TOGETHER

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 50
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
    (policy := tmp_path / "policy.yaml").write_text("jobs: {grow_after: 0 s}\n")
    os.mkfifo(pipe := tmp_path / "pace")
    pace = os.open(pipe, os.O_RDWR)
    try:
        with Occupants(range(1, RANKS)) as others:
            subprocess.run([*SING, "policy", "apply", str(policy)], check=True)
            resizes = Resizes(seed, others, pace)
            found = weights(model, RANKS, monkeypatch, resizes, steps=STEPS, seed=seed, pace=pipe)
    finally:
        os.close(pace)
    assert found == undisturbed
    assert len(set(resizes.seen)) > 1


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
