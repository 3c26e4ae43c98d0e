"""Real programs of several users that share a device by a policy."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from tests.e2e.trainers import Program, program, session_of

pytestmark = [pytest.mark.e2e]

STEPS = 1500
CELLS = 5
POLICY = """
virtual_clusters:
  lab:
    users:
      - {name: grace, tier: premium}
      - {name: robot, tier: basic}
      - {name: ada, weight: 1}
      - {name: edsger, weight: 1}
"""


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:512MiB@1")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    sing("policy", "apply", str(file))


def sing(*arguments: str) -> str:
    command = [sys.executable, "-m", "jupyter_sing.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def decided(trainer: Program) -> list[tuple[float, str]]:
    """Return times and kinds of the decisions about a session, the oldest first."""
    said = json.loads(sing("why", trainer.session, "--count", "10000", "--json"))
    return [(each["at"], each["kind"]) for each in said["decisions"]]


def kinds(trainer: Program) -> list[str]:
    return [kind for _, kind in decided(trainer)]


def test_a_premium_users_cells_run_first_while_a_basic_one_trains() -> None:
    with ExitStack() as stack:
        robot, grace = (
            stack.enter_context(program(seed, proxied=True, device="cpu:0", user=user))
            for seed, user in ((1, "robot"), (2, "grace"))
        )
        for each in (robot, grace):
            assert each.answer() == ["ready"]
        losses: list[str] = []
        done, preempted = 0, 0
        # Until each of grace's cells has preempted robot's training, however fast this machine is.
        while preempted < CELLS:
            robot.ask(STEPS)
            before = kinds(robot).count("preempt")
            losses += grace.train(3)
            preempted += kinds(robot).count("preempt") - before
            answer = robot.answer()
            assert len(answer) == STEPS
            done += STEPS
            if done == STEPS:
                first = answer
        assert session_of(grace)["owner"] == "grace"
        # Grace has never waited for the end of a turn of robot's: no turn had ended.
        assert "preempt" not in kinds(grace)
    with program(1, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        assert plain.train(STEPS) == first
    with program(2, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        assert plain.train(len(losses)) == losses


def test_two_users_take_turns_for_as_long_as_both_train() -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(program(seed, proxied=True, device="cpu:0", user=user))
            for seed, user in ((1, "ada"), (2, "edsger"))
        ]
        for each in both:
            assert each.answer() == ["ready"]
        enough = Event()

        def train(each: Program) -> None:
            # It always has a next cell, so that both want the device until the end.
            each.ask(STEPS)
            each.ask(STEPS)
            while not enough.is_set():
                assert len(each.answer()) == STEPS
                each.ask(STEPS)
                if min(kinds(who).count("preempt") for who in both) >= 3:
                    enough.set()
            for _ in range(2):
                assert len(each.answer()) == STEPS

        with ThreadPoolExecutor() as threads:
            training = [threads.submit(train, each) for each in both]
            try:
                for ended in as_completed(training):
                    ended.result()
            finally:
                enough.set()
        found = [[(at, kind, who) for at, kind in decided(who)] for who in both]
        told = sorted((each for one in found for each in one), key=lambda each: each[0])
        ends = [i for i, (_, kind, _) in enumerate(told) if kind == "preempt"]
        # While both want the device, the next turn after a preemption is the other one's.
        for i in ends:
            _, _, who = told[i]
            after = next((each for _, kind, each in told[i:] if kind == "grant"), None)
            assert after is None or after is not who
