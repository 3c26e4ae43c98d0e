"""The scheduler's benchmark runs, with small parameters, and reports targets that are missed."""

from __future__ import annotations

import dataclasses
import operator

import pytest

from benchmarks.scheduler import __main__ as scheduler
from jupyter_sing.simulator.baselines import BASELINES
from jupyter_sing.simulator.cluster import SimulatedCluster
from jupyter_sing.simulator.generator import Parameters

SMALL = scheduler.Setting(
    "Small",
    Parameters(sessions=8, training=80, quick=40, days=1, load=1.0),
    SimulatedCluster(2),
    (
        scheduler.Requirement("ttg_p99", operator.le, 60.0),
        scheduler.Requirement("jain", operator.ge, 1.5),
    ),
)


def test_small_benchmark_reports_what_is_met_and_what_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "SETTINGS", (SMALL,))
    assert scheduler.main(["--seeds", "2", "--openb-every", "40"]) == 1
    printed = capsys.readouterr().out
    for name in BASELINES:
        assert printed.count(f"| {name} (seed {scheduler.FIRST}) |") == 1
    assert printed.count("| sing (seed ") == 2
    assert printed.count("- met: ttg_p99 ") == 2
    assert printed.count("- NOT MET: jain ") == 2
    assert "| fgd | " in printed
    modest = dataclasses.replace(SMALL, claims=SMALL.claims[:1])
    monkeypatch.setattr(scheduler, "SETTINGS", (modest,))
    assert scheduler.main(["--seeds", "1", "--no-baselines", "--openb-every", "40"]) == 0
    assert "reserve" not in capsys.readouterr().out
