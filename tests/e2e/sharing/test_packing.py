"""Real programs that execute on a device at the same time, while that is measured to be faster."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_sing.controller import decision_log
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from tests.e2e.trainers import PROGRAM, Program, program, session_of

pytestmark = [pytest.mark.e2e]

PACING = PROGRAM.with_name("pacing.py")
SEEDS = (1, 2)
SHARES = re.compile(r"Shares Simulated GPU 0 with pacing-[12] as long as that is faster for both\.")
PROGRESS = re.compile(r"together they make ([0-9.]+) times")


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("defaults: {packing: true}\n")
    monkeypatch.setenv("JUPYTER_SING_POLICY", str(policy))
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:384MiB@1")


def decided(trainer: Program) -> list[decision_log.DecisionEntry]:
    """Return the decisions about a session, oldest first."""
    try:
        return decision_log.read(paths.runtime_dir(), trainer.session, 10_000)
    except ControlError:  # nothing is written down yet
        return []


def judged(trainer: Program) -> dict[str, list[float]]:
    """Return the progress of a pair relative to taking turns, wherever a decision states it."""
    measured: dict[str, list[float]] = {"pack": [], "unpack": []}
    for each in decided(trainer):
        if each.kind in measured and (progress := PROGRESS.search(each.reason)):
            measured[each.kind].append(float(progress[1]))
    return measured


@pytest.mark.parametrize("pace", ["wait", "thrash"])
def test_programs_that_share_a_device_are_faster_so_or_are_parted(
    pace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACE", f"thrash {tmp_path / 'shared'}" if pace == "thrash" else pace)
    over, shared = tmp_path / "over", False
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(program(seed, proxied=True, device="cpu:0", path=PACING))
            for seed in SEEDS
        ]
        stack.callback(over.touch)
        for each in trainers:
            assert each.answer() == ["ready"]
        for each in trainers:
            each.ask(str(over))
        # The result depends on the machine and on its load: decisions must agree with what was
        # measured.
        while not (shared and any(judged(trainers[0]).values())):
            shared |= any(SHARES.search(session_of(each)["reason"]) for each in trainers)
            time.sleep(0.1)
        found = [session_of(each) for each in trainers]
        over.touch()
        losses = [each.answer() for each in trainers]
        while (verdicts := judged(trainers[0])) != judged(trainers[1]):
            time.sleep(0.1)  # written after a short while
    assert all(progress >= 1.2 for progress in verdicts["pack"])
    assert all(progress < 1.2 for progress in verdicts["unpack"])
    for session in found:
        assert session["step_seconds"] is not None
        assert session["step_seconds"] > 0
        assert session["memory_nadir"] is not None
        assert 0 < session["memory_nadir"] <= 384 << 20
    for seed, answer in zip(SEEDS, losses, strict=True):
        with program(seed, proxied=False) as plain:
            assert plain.answer() == ["ready"]
            assert plain.train(len(answer)) == answer
