"""Collectives between the sessions of a job's ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.ranks import RankProcesses, job, kill_workers, signal_rank

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 9
RANDOM_PROGRAMS = 30


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("SING_CHECK_SPLICING", "1")  # see test_bits.py
    monkeypatch.setenv("JUPYTER_SING_DEVICES", ",".join(["cpu:512MiB@1"] * count))


@pytest.fixture(autouse=True)
def _own_daemon(runtime_dir: Path) -> None:
    """Give each test a daemon of its own."""


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_features_of_torch_distributed_work(
    ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices(monkeypatch, ranks)
    with job(ranks, "checks.py", directory=tmp_path) as running:
        outputs = running.outputs()
    source = (Path(__file__).parents[2] / "programs/collectives/checks.py").read_text()
    assert all(len(output) == source.count("@check\n") for output in outputs), outputs


@pytest.mark.parametrize(
    "name",
    [
        "large_tensors_are_as_before_after_a_collective_that_failed",
        "calls_without_a_wait_between_them_use_each_others_results",
    ],
)
def test_large_tensors_on_a_shared_device(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices(monkeypatch, 1)
    with job(3, "checks.py", name, directory=tmp_path, device="cpu:0") as running:
        assert running.outputs() == [[name]] * 3


def random_programs(first: int, count: int, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    devices(monkeypatch, 3)
    with job(3, "random_calls.py", str(first), str(count), directory=path) as running:
        assert running.outputs() == [[f"{count} programs"]] * 3


def test_random_programs_have_the_expected_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    random_programs(0, RANDOM_PROGRAMS, monkeypatch, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_more_random_programs(part: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    random_programs(1000 + 100 * part, 100, monkeypatch, tmp_path)


def weights(running: RankProcesses) -> set[str]:
    """Return the hashes of the ranks' weights."""
    found = {output[-1] for output in running.outputs()}
    assert all(line.startswith("weights ") for line in found), found
    return found


def test_weights_are_the_same_bits_on_any_number_of_devices_and_after_deaths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices(monkeypatch, 2)
    with job(2, "weights.py", str(STEPS), directory=tmp_path) as running:
        (expected,) = weights(running)
    with job(2, "weights.py", str(STEPS), directory=tmp_path) as running:
        killed = 0
        for number in range(STEPS):
            assert running.line(0) == f"step {number}"
            if number in (2, 6):
                killed += kill_workers()
        assert killed >= 2
        assert weights(running) == {expected}
    with job(2, "weights.py", str(STEPS), directory=tmp_path, device="cpu:0") as running:
        assert weights(running) == {expected}


def test_a_rank_that_waits_can_be_interrupted_and_others_learn_of_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices(monkeypatch, 3)
    with job(3, "waiting.py", directory=tmp_path) as running:
        assert [running.line(rank) for rank in range(3)] == ["ready"] * 3
        signal_rank(running.ranks[1], signal.SIGINT)
        assert running.line(1) == "interrupted"
        assert running.ranks[1].wait(60) == 0
        signal_rank(running.ranks[0], signal.SIGKILL)
        assert running.line(2) == "process group '0': the process of rank 0 has ended"
        assert running.ranks[2].wait(60) == 0
