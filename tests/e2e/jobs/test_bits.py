"""The weights of a job are the same bits, wherever its ranks run, and whatever happens to them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import MigrateRequest, Resume, SessionReply, Suspend
from tests.e2e.jobs.trained import RANKS, Kills, stop, weights
from tests.e2e.kernels import sessions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEEDS = (1, 2, 3, 4, 5)
LATER = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _own_daemon(runtime_dir: Path) -> None:
    """Give each test a daemon of its own."""


#: Hashes of weights after an undisturbed training, by model and seed.
_expected: dict[tuple[str, int], str] = {}


def expected(model: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the hash for as many devices as ranks."""
    if (model, seed) not in _expected:
        _expected[model, seed] = weights(model, RANKS, monkeypatch, seed=seed)
        stop()
    return _expected[model, seed]


def models(first: str) -> pytest.MarkDecorator:
    """Run a test with all models and seeds, if there is time; else with one of each."""
    return pytest.mark.parametrize(
        ("model", "seed"),
        [
            pytest.param(model, seed, marks=() if (model, seed) == (first, 1) else LATER)
            for model in ("mlp", "resnet", "gpt2", "fsdp2")
            for seed in SEEDS
        ],
    )


@models("fsdp2")
def test_the_number_of_devices_does_not_show_in_the_weights(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for devices in (1, 2):
        found = weights(model, devices, monkeypatch, seed=seed)
        stop()
        assert found == expected(model, seed, monkeypatch)


class Moves:
    """Moves, suspends and resumes random ranks after every few steps."""

    def __init__(self, seed: int, devices: int, every: int = 3) -> None:
        self._chance, self._devices, self._every = random.Random(seed), devices, every
        self.count = 0

    def __call__(self, step: int) -> None:
        if step % self._every:
            return
        for session in sessions():
            device = f"cpu:{self._chance.randrange(self._devices)}"
            with agent_client.connect(start=False) as connection:
                connection.expect(SessionReply, MigrateRequest(session["id"], device), 60)
            self.count += 1
        chosen = self._chance.choice(sessions())["id"]
        with agent_client.connect(start=False) as connection:
            connection.expect(SessionReply, Suspend(chosen), 60)
            connection.expect(SessionReply, Resume(chosen), 60)


@models("resnet")
def test_moves_of_ranks_do_not_show_in_the_weights(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(seed, 2)
    undisturbed = expected(model, seed, monkeypatch)
    assert weights(model, 2, monkeypatch, moves, seed=seed) == undisturbed
    assert moves.count >= RANKS


@models("resnet")
def test_deaths_of_workers_do_not_show_in_the_weights(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = Kills(seed)
    undisturbed = expected(model, seed, monkeypatch)
    assert weights(model, 2, monkeypatch, kills, seed=seed) == undisturbed
    assert kills.count >= RANKS


@pytest.mark.parametrize(
    ("model", "seed"),
    [("mlp", 1), *(pytest.param(model, seed, marks=pytest.mark.exhaustive)
                   for model in ("resnet", "gpt2", "fsdp2") for seed in (1, 2))],
)  # fmt: skip
def test_deaths_of_workers_and_agents_do_not_show_in_the_weights(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(model, 2, monkeypatch, seed=seed, ranks=2)
    kills = Kills(seed, 3, agent_at=6)
    assert weights(model, 2, monkeypatch, kills, seed=seed, ranks=2) == expected
    assert kills.count >= 2
