"""Figures of a simulation, and their output: as JSON, as a table, as a plot (`plot.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jupyter_sing.scheduler.fairness.tier_targets import LOST_MIN
from jupyter_sing.scheduler.settings import TARGETS, Tier
from jupyter_sing.simulator.outcome import SessionRecord, SimulationOutcome
from jupyter_sing.simulator.quantiles import quantile
from kernelproxy.common.units import seconds_text

SHORT_MAX = 60.0
LONG_MIN = 3600.0
SOON = 1.0
DAY = 86_400.0
_EPSILON = 1e-6  # of sums of floats


@dataclass(frozen=True)
class Result:
    """Figures of one scheduler on a workload. Times in seconds.

    Parameters
    ----------
    scheduler : str
    ttg_p50, ttg_p99 : float
        From the submission of a cell until it executes first, over all cells. That includes the
        wait for admission of a reservation.
    short_cells_within_1s : float
        Share of the cells of up to 60 s that execute within a second; 1 if there are none.
    long_cell_slowdown : float
        Mean of (end - submission) / duration of the cells of more than an hour; 1 if there are
        none.
    utilisation : float
        Device time executed over device time until the last cell ends.
    jain : float
        Jain's index of the shares of their runnable time that sessions of the same virtual
        cluster, tier, weight and number of devices executed; of several such groups the lowest.
    swaps : int
        Loads of sessions that had been on a device before.
    tier_violations : int
        Session-hours (by the clock) in which a session got less than its tier's fraction of the
        time in which it had a cell, and lost more than two seconds.
    finished_days : float
        When the last cell ended.
    ttg_p999, ttg_max : float
    finish_fairness_max, finish_fairness_mean : float
        Themis' rho of a session: its life over its life with a fair part of the devices. That is
        its think time, and its work times the devices that were needed per device (if more than
        one) on average over its life. Above 1 it had less than its part.
    switch_share : float
        Device time granted and not executing (loading), over device time granted.
    preemptions : int
    moved_bytes : int
    fragmentation : float
        Mean part of the devices that is free and of no use to the cells (FGD).
    """

    scheduler: str
    ttg_p50: float
    ttg_p99: float
    short_cells_within_1s: float
    long_cell_slowdown: float
    utilisation: float
    jain: float
    swaps: int
    tier_violations: int
    finished_days: float
    ttg_p999: float
    ttg_max: float
    finish_fairness_max: float
    finish_fairness_mean: float
    switch_share: float
    preemptions: int
    moved_bytes: int
    fragmentation: float


def measure(
    scheduler: str, outcome: SimulationOutcome, targets: Mapping[Tier, float] = TARGETS
) -> Result:
    """Compute the figures of an outcome; `targets` are the target fractions by tier."""
    waits = sorted(cell.time_to_gpu for cell in outcome.cells)
    short = [cell.time_to_gpu for cell in outcome.cells if cell.duration <= SHORT_MAX]
    long = [
        (cell.finished - cell.submitted) / cell.duration
        for cell in outcome.cells
        if cell.duration > LONG_MIN
    ]
    rhos = [finish_fairness(record, outcome.gpus) for record in outcome.sessions]
    capacity = outcome.gpus * outcome.finished
    return Result(
        scheduler=scheduler,
        ttg_p50=quantile(waits, 0.5),
        ttg_p99=quantile(waits, 0.99),
        short_cells_within_1s=_mean([float(wait <= SOON) for wait in short]),
        long_cell_slowdown=_mean(long),
        utilisation=outcome.executed / capacity if capacity else 0.0,
        jain=fairness(outcome.sessions),
        swaps=outcome.swaps,
        tier_violations=sum(violations(record, targets) for record in outcome.sessions),
        finished_days=outcome.finished / DAY,
        ttg_p999=quantile(waits, 0.999),
        ttg_max=waits[-1] if waits else 0.0,
        finish_fairness_max=max(rhos, default=1.0),
        finish_fairness_mean=_mean(rhos),
        switch_share=outcome.switching / outcome.charged if outcome.charged else 0.0,
        preemptions=outcome.preemptions,
        moved_bytes=outcome.moved,
        fragmentation=outcome.fragmented / capacity if capacity else 0.0,
    )


def jain(values: Sequence[float]) -> float:
    """Return Jain's index: 1 if all are equal, 1/n if one has everything."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness(records: Sequence[SessionRecord]) -> float:
    """Return the lowest of Jain's indices of groups of equal sessions."""
    groups: dict[tuple[str, Tier, float, int], list[float]] = {}
    for record in records:
        if record.runnable > 0:
            key = record.vc, record.tier, record.weight, record.gpus
            groups.setdefault(key, []).append(record.executed / record.runnable)
    return min((jain(values) for values in groups.values()), default=1.0)


def finish_fairness(record: SessionRecord, gpus: int) -> float:
    """Return Themis' rho of a session, as defined in `Result`."""
    contention = max(1.0, record.demand / gpus)
    fair = record.alone + record.executed * (contention - 1.0)
    return (record.closed - record.opened) / fair if fair else 1.0


def violations(record: SessionRecord, targets: Mapping[Tier, float] = TARGETS) -> int:
    """Count the hours in which a session missed the target of its tier."""
    target, count = targets[record.tier], 0
    for runnable, executed in record.hours.values():
        lost = runnable - executed
        count += lost > LOST_MIN + _EPSILON and executed < target * runnable - _EPSILON
    return count


def as_json(sessions: int, cells: int, gpus: int, results: Sequence[Result]) -> dict[str, object]:
    """Return what ``jupyter sing simulate --json`` prints."""
    return {
        "sessions": sessions,
        "cells": cells,
        "gpus": gpus,
        "results": [asdict(result) for result in results],
    }


HEADER = (
    "scheduler", "TTG p50", "TTG p99", "TTG max", "short < 1 s", "long cells", "used", "Jain",
    "rho max", "violations", "swaps", "switching", "fragmented", "days",
)  # fmt: skip


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the table's rows, as texts."""
    return [
        (
            result.scheduler,
            seconds_text(result.ttg_p50),
            seconds_text(result.ttg_p99),
            seconds_text(result.ttg_max),
            f"{100 * result.short_cells_within_1s:.1f} %",
            f"{result.long_cell_slowdown:.2f}x",
            f"{100 * result.utilisation:.0f} %",
            f"{result.jain:.3f}",
            f"{result.finish_fairness_max:.2f}",
            f"{result.tier_violations:,}",
            f"{result.swaps:,}",
            f"{100 * result.switch_share:.1f} %",
            f"{100 * result.fragmentation:.1f} %",
            f"{result.finished_days:.1f}",
        )
        for result in results
    ]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return rows below the header as Markdown."""
    every = [HEADER, ("---",) + ("---:",) * (len(HEADER) - 1), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; 1 for no values, as all these figures are ratios."""
    return math.fsum(values) / len(values) if values else 1.0
