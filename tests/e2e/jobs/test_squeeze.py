"""A job of several ranks gives a device to a session that comes first, and gets it back."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.doubles.waiting import wait_until
from tests.e2e.jobs.trained import RANKS, training
from tests.e2e.kernels import sessions
from tests.e2e.trainers import program, session_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 600
POLICY = """
jobs: {grow_after: 1 s}
virtual_clusters: {lab: {users: [{name: alice, tier: premium}, bob]}}
"""
ON_TWO = "Running on the GPU. Job of 4 ranks runs on 2 devices."
ON_ONE = (
    "Running on the GPU. Job of 4 ranks runs on 1 of 2 devices: alice waits with premium; "
    "it grows again when a device has been idle for 1 s."
)
SHRINKS = "Job of 4 ranks shrinks from 2 devices to 1: alice waits with premium."
GROWS = "Job of 4 ranks grows from 1 device to 2: a device has been idle for 1 s."
SECONDS_MAX = 30.0


def sing(*arguments: str) -> str:
    command = [sys.executable, "-m", "jupyter_sing.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_USER", "bob")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    sing("policy", "apply", str(file))


def weights(output: list[str]) -> str:
    """Return the hash that all ranks have printed."""
    found = [line.split()[-1] for line in output if "weights" in line]
    assert len(found) == RANKS, output[-RANKS:]
    assert len(set(found)) == 1, found
    return found[0]


def train() -> str:
    with training("mlp", STEPS, 1, RANKS) as process:
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
    return weights(output.splitlines())


def ranks_on(devices: int, reason: str) -> dict[str, list[str]]:
    """Return the sessions of the ranks by device, once all run on so many for this reason."""
    found: dict[str, list[str]] = {}
    ranks = [each for each in sessions() if each["owner"] == "bob"]
    for each in ranks:
        found.setdefault(each["device"] or "", []).append(each["id"])
    told = {(each["state"], each["reason"]) for each in ranks}
    if len(ranks) == RANKS and len(found) == devices and told == {("running", reason)}:
        return found
    return {}


def decisions(session: str) -> list[tuple[str, str]]:
    said = json.loads(sing("why", session, "--count", "1000", "--json"))
    return [(each["kind"], each["reason"]) for each in said["decisions"]]


def test_a_premium_user_squeezes_a_job_onto_one_device_and_gives_it_back(
    tmp_path: Path, runtime_dir: Path
) -> None:
    undisturbed = train()
    enough = tmp_path / "enough"
    with ThreadPoolExecutor() as threads:
        with program(1, proxied=True, user="alice") as alice:
            assert alice.answer() == ["ready"]
            job = threads.submit(train)
            wait_until(lambda: ranks_on(2, ON_TWO), SECONDS_MAX)
            alice.ask(str(enough))
            try:
                ((left, ranks),) = wait_until(lambda: ranks_on(1, ON_ONE), SECONDS_MAX).items()
                assert session_of(alice)["device"] != left
            finally:
                enough.touch()
            assert alice.answer()
        # Only now: a program that has nothing to execute keeps its device until others wait for it.
        wait_until(lambda: ranks_on(2, ON_TWO), SECONDS_MAX)
        told = [(kind, text) for kind, text in decisions(ranks[0]) if kind in ("shrink", "grow")]
        assert told == [("shrink", SHRINKS), ("grow", GROWS)]
        assert "is prepared to move" in next(runtime_dir.rglob("agent.log")).read_text()
        assert job.result() == undisturbed
