"""Figures of a simulation, computed by hand, and their display."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict

import pytest

from benchmarks.scheduler.sharing import node_fragment
from jupyter_sing.scheduler.settings import Tier
from jupyter_sing.simulator import plot, report
from jupyter_sing.simulator.baselines import BASELINES
from jupyter_sing.simulator.fragmentation import fragment
from jupyter_sing.simulator.outcome import CellRecord, SessionRecord, SimulationOutcome
from jupyter_sing.simulator.workload import arranged
from tests.scheduler.simulated import instant, run, session

NAMED = (  # interface.md
    "scheduler", "ttg_p50", "ttg_p99", "short_cells_within_1s", "long_cell_slowdown",
    "utilisation", "jain", "swaps", "tier_violations", "finished_days",
)  # fmt: skip


def cell(wait: float, duration: float, slower: float = 0.0) -> CellRecord:
    """Return a cell submitted at 100 that ends this much later than it would without stops."""
    return CellRecord("a", 1, duration, 100.0, 100.0 + wait, 100.0 + wait + duration + slower)


def record(runnable: float, executed: float, tier: Tier = Tier.STANDARD) -> SessionRecord:
    return SessionRecord("a", 1, tier, 1.0, 0.0, runnable=runnable, executed=executed)


def test_times_to_gpu_are_those_of_all_cells() -> None:
    cells = [cell(wait, 10.0) for wait in (*[0.0] * 50, *[0.5] * 48, 3.0, 100.0)]
    found = report.measure("x", SimulationOutcome(2, cells, finished=864_000.0, executed=864_000.0))
    assert (found.ttg_p50, found.ttg_p99, found.ttg_max) == (0.0, 3.0, 100.0)
    assert found.short_cells_within_1s == 0.98
    assert (found.utilisation, found.finished_days) == (0.5, 10.0)


def test_short_and_long_cells_are_distinguished_by_their_computation() -> None:
    cells = [
        cell(5.0, 60.0),  # short and late
        cell(1.0, 1.0),  # short and in time
        cell(9.0, 61.0),  # neither
        cell(0.0, 3600.0, slower=999.0),  # no longer than an hour
        cell(1000.0, 4000.0, slower=1000.0),
        cell(0.0, 4000.0),
    ]
    found = report.measure("x", SimulationOutcome(1, cells))
    assert found.short_cells_within_1s == 0.5
    assert found.long_cell_slowdown == pytest.approx((1.5 + 1.0) / 2)


def test_without_short_or_long_cells_nothing_is_wrong_with_them() -> None:
    found = report.measure("x", SimulationOutcome(1))
    assert (found.short_cells_within_1s, found.long_cell_slowdown, found.jain) == (1.0, 1.0, 1.0)
    assert (found.ttg_p99, found.utilisation) == (0.0, 0.0)


def test_jains_index() -> None:
    assert report.jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert report.jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert report.jain([1.0, 0.5]) == pytest.approx(2.25 / 2.5)


def test_fairness_is_among_equals() -> None:
    equal = [record(100, 80), record(50, 40)]
    other = [record(100, 20, Tier.BASIC), record(100, 20, Tier.BASIC)]
    assert report.fairness([*equal, *other]) == pytest.approx(1.0)
    assert report.fairness([*equal, *other, record(10, 10, Tier.BASIC)]) == pytest.approx(
        report.jain([0.2, 0.2, 1.0])
    )
    assert report.fairness([record(0, 0)]) == 1.0


def test_finish_time_fairness_is_the_life_over_a_fair_life() -> None:
    found = SessionRecord("a", 1, Tier.STANDARD, 1.0, opened=10.0, closed=410.0, alone=200.0)
    found.executed, found.demand = 100.0, 6.0
    # Alone it takes 200 s, 100 of them computing; of 2 devices for which 6 are asked it may have
    # a third: 400 s.
    assert report.finish_fairness(found, 2) == pytest.approx(1.0)
    assert report.finish_fairness(found, 12) == pytest.approx(2.0)


def test_hours_in_which_a_tier_was_missed_are_counted() -> None:
    found = record(0, 0)
    found.note_runnable(3500.0, 7300.0)
    found.note_executed(3500.0, 3600.0)
    found.note_executed(6000.0, 7300.0)
    assert found.hours == {0: [100.0, 100.0], 1: [3600.0, 1200.0], 2: [100.0, 100.0]}
    assert found.runnable == 3800.0
    assert report.violations(found) == 1
    found.tier = Tier.BASIC
    assert report.violations(found) == 0


@pytest.mark.parametrize(
    ("tier", "runnable", "executed", "missed"),
    [
        (Tier.STANDARD, 100.0, 70.0, 0),
        (Tier.STANDARD, 100.0, 69.0, 1),
        (Tier.PREMIUM, 100.0, 94.0, 1),
        (Tier.PREMIUM, 100.0, 96.0, 0),
        (Tier.STANDARD, 3.0, 1.0, 0),  # two seconds of loss are tolerated
        (Tier.STANDARD, 3.1, 1.0, 1),
    ],
)
def test_tiers_have_targets(tier: Tier, runnable: float, executed: float, missed: int) -> None:
    found = record(0, 0, tier)
    found.hours[0] = [runnable, executed]
    assert report.violations(found) == missed


def test_memory_that_no_cell_can_use_is_fragmented() -> None:
    assert fragment(3, [(1, 0.5), (2, 0.25), (4, 0.25)]) == pytest.approx(0.75)
    assert fragment(8, [(8, 1.0)]) == 0.0
    # Of 300 + 800: half of the tasks need 500, and can use the 800; the others need two of 200.
    assert node_fragment([300, 800], [(1, 500, 0.5), (2, 200, 0.5)]) == pytest.approx(150)
    assert node_fragment([300, 800], [(2, 500, 1.0)]) == 1100


def test_fragmentation_is_a_mean_over_time() -> None:
    # While the wide cell waits 10 s, one of two devices is free: no use to half of the cells.
    workload = arranged([session("a", (0, 10)), session("wide", (0, 10), gpus=2)])
    cluster = instant(2)
    outcome = run(workload, cluster, BASELINES["fcfs"](cluster.devices()))
    assert outcome.finished == 20.0
    assert outcome.fragmented == pytest.approx(10 * 0.5)
    assert report.measure("fcfs", outcome).fragmentation == pytest.approx(5 / 40)


def test_demand_is_the_mean_of_what_was_requested() -> None:
    workload = arranged([session("a", (0, 30)), session("b", (10, 10))])
    cluster = instant(1)
    outcome = run(workload, cluster, BASELINES["fcfs"](cluster.devices()))
    a, b = outcome.sessions
    assert (a.demand, b.demand) == pytest.approx((50 / 30, (2 * 20 + 10) / 30))
    assert (b.runnable, b.executed, b.alone) == (30.0, 10.0, 10.0)


def test_json_has_the_keys_of_the_interface() -> None:
    result = report.measure("sing", SimulationOutcome(6))
    shown = report.as_json(71, 7581, 6, [result])
    assert list(shown) == ["sessions", "cells", "gpus", "results"]
    (found,) = json.loads(json.dumps(shown))["results"]
    assert tuple(found)[: len(NAMED)] == NAMED
    assert found == asdict(result)


def test_the_table_has_a_line_for_each() -> None:
    results = [
        report.measure(name, SimulationOutcome(1, [cell(1538.4, 10)])) for name in ("sing", "fcfs")
    ]
    lines = report.markdown_table(report.rows(results)).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| sing | 1,538 s | 1,538 s |")


def test_the_plot_is_a_document_with_a_curve_for_each() -> None:
    found = plot.plot([("sing", [0.0, 0.5, 2.0]), ("<fcfs>", [1e9] * 5000), ("none", [])])
    root = ElementTree.fromstring(found)
    space = "{http://www.w3.org/2000/svg}"
    curves = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert [len(points) > 0 for points in curves] == [True, True, False]
    assert "<fcfs>" in [text.text for text in root.iter(f"{space}text")]
    for points in curves:
        heights = [float(point.split(",")[1]) for point in points]
        assert heights == sorted(heights, reverse=True)  # rounded up
    assert curves[0][0].startswith(f"{plot.LEFT:.1f},")
