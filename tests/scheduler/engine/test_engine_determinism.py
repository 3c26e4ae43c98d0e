"""The same events give the same decisions, and the benchmark of decisions runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scheduler import decisions

PROGRAM = """
import hashlib
from benchmarks.scheduler import decisions
log = decisions.decisions_of(300, 24, {count}, 7)
print(len(log), hashlib.sha256("\\n".join(log).encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("events", "least"),
    [
        (15_000, 5_000),
        pytest.param(100_000, 10_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)]),
    ],
)
def test_the_same_events_give_the_same_decisions_in_every_process(events: int, least: int) -> None:
    """Hash seeds differ between the two: no decision may depend on the order of a set."""
    root = Path(__file__).resolve().parents[3]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(count=events)],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in running)
    assert first == second
    assert int(first.split()[0]) > least


def test_other_events_give_other_decisions() -> None:
    digests = {
        hashlib.sha256("\n".join(decisions.decisions_of(30, 4, 500, seed)).encode()).hexdigest()
        for seed in (1, 2)
    }
    assert len(digests) == 2


def test_the_benchmark_runs_small() -> None:
    times = decisions.measure(sessions=40, devices=4, count=200)
    assert times.events == 200
    assert 0.0 < times.p50 <= times.p99 <= times.max
