"""Ranks of a job that are on one device: they share a process there, and end or move alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import MigrateRequest, Resume, SessionReply, Suspend
from tests.doubles.waiting import wait_until
from tests.e2e.conductor import PROGRAM, ROOT, ConductedRank, Conductor, conductor
from tests.e2e.kernels import sessions
from tests.integration.conftest import lives

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECONDS_MAX = 120


@pytest.fixture(autouse=True)
def _own_daemon(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a daemon of its own."""
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:512MiB@1,cpu:512MiB@1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextmanager
def job(directory: Path, count: int = 2) -> Iterator[list[ConductedRank]]:
    """Start a job with all its ranks on one device; end it."""
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", str(count)]
    with (
        conductor(directory) as made,
        subprocess.Popen(
            [*command, "--device", "cpu:0", str(PROGRAM), str(made.path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield made.ranks(count)
        finally:
            end(made, process)


def end(made: Conductor, process: subprocess.Popen[str]) -> None:
    made.dismiss()
    try:
        process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()


def train(ranks: list[ConductedRank], steps: int) -> str:
    """Train; return the hash of the weights, of which each rank has the same."""
    for rank in ranks:
        rank.tell(f"train {steps}")
    (found,) = {rank.answer() for rank in ranks}
    return found


def ask(request: Suspend | Resume | MigrateRequest) -> None:
    with agent_client.connect(start=False) as connection:
        connection.expect(SessionReply, request, SECONDS_MAX)


def pid(rank: ConductedRank) -> int:
    """Return the pid of the process that executes a rank, which it has."""

    def found() -> int | None:
        return next(e["worker_pid"] for e in sessions() if e["id"] == rank.session)

    return wait_until(found) or 0


def undisturbed(directory: Path, steps: list[int]) -> list[str]:
    """Return the hashes of a job to which nothing happens."""
    directory.mkdir()
    with job(directory) as ranks:
        return [train(ranks, count) for count in steps]


def test_ranks_on_one_device_have_one_process_and_those_of_another_job_another(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with job(tmp_path / "a") as first, job(tmp_path / "b") as second:
        for ranks in (first, second):
            train(ranks, 2)
        found = [pid(rank) for rank in (*first, *second)]
        assert found[0] == found[1] != found[2] == found[3]


def test_a_job_whose_process_is_killed_has_the_same_weights(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "before", [2, 3, 2])
    with job(tmp_path) as ranks:
        found = [train(ranks, 2)]
        process = pid(ranks[0])
        assert pid(ranks[1]) == process
        for rank in ranks:
            rank.tell("train 3")
        os.kill(process, signal.SIGKILL)
        (weights,) = {rank.answer() for rank in ranks}
        found += [weights, train(ranks, 2)]
        assert found == expected
        assert process not in [pid(rank) for rank in ranks]

        def together() -> bool:
            train(ranks, 1)
            return pid(ranks[0]) == pid(ranks[1])

        wait_until(together)


def test_a_rank_that_is_suspended_or_moved_leaves_the_others(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "before", [2, 2, 2, 2])
    with job(tmp_path) as ranks:
        first, second = ranks
        found = [train(ranks, 2)]
        process = pid(second)
        ask(Suspend(first.session))
        assert pid(second) == process
        ask(Resume(first.session))
        found.append(train(ranks, 2))
        assert (pid(first), pid(second)) == (process, process)
        ask(MigrateRequest(first.session, "cpu:1"))
        found.append(train(ranks, 2))
        moved = pid(first)
        assert pid(second) == process != moved
        ask(MigrateRequest(first.session, "cpu:0"))
        found.append(train(ranks, 2))
        wait_until(lambda: not lives(moved))
        assert (pid(first), pid(second)) == (process, process)
        assert found == expected


def test_the_process_outlives_the_rank_that_it_was_started_for(tmp_path: Path) -> None:
    with job(tmp_path, 3) as ranks:
        train(ranks, 1)
        process = pid(ranks[2])
        for rank in ranks[:2]:
            ask(Suspend(rank.session))
        assert pid(ranks[2]) == process
        ask(Suspend(ranks[2].session))
        wait_until(lambda: not lives(process))


def test_without_seats_each_rank_has_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_SEATS", "0")
    with job(tmp_path) as ranks:
        train(ranks, 1)
        assert pid(ranks[0]) != pid(ranks[1])
