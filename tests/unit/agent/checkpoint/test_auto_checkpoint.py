"""Due times of automatic checkpoints, and how users write and read them."""

from __future__ import annotations

import pytest

from jupyter_sing.notebook import magics, status_text
from kernelproxy.agent.checkpoint.auto_checkpoint import AutoCheckpointRule
from kernelproxy.agent.checkpoint.history import KernelRuns
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol.views import AutomaticView

NEVER = float("inf")


@pytest.mark.parametrize(
    ("rule", "cells", "seconds", "left"),
    [
        (AutoCheckpointRule(), 100, 1e6, NEVER),
        (AutoCheckpointRule(every=10), 0, 4, 6),
        (AutoCheckpointRule(every=10), 1, 11, 0),
        (AutoCheckpointRule(cells=3), 2, 1e6, NEVER),
        (AutoCheckpointRule(cells=3), 3, 0, 0),
        (AutoCheckpointRule(every=10, cells=3), 2, 4, 6),
        (AutoCheckpointRule(every=10, cells=3), 4, 4, 0),
        (AutoCheckpointRule(every=-1, cells=-1), 4, 4, NEVER),
    ],
)
def test_a_checkpoint_is_due_by_time_or_cells(
    rule: AutoCheckpointRule, cells: int, seconds: float, left: float
) -> None:
    assert rule.seconds_left(cells, seconds) == left


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("off", (0, 0)),
        ("90s", (90, 0)),
        ("10m", (600, 0)),
        ("1.5h", (5400, 0)),
        ("10 m", (600, 0)),
        ("20 cells", (0, 20)),
        ("1 cell", (0, 1)),
        ("20cells", (0, 20)),
        ("10m 20 cells", (600, 20)),
        ("every 10m or 20 cells", (600, 20)),
    ],
)
def test_intervals_are_read(text: str, rule: tuple[float, int]) -> None:
    assert magics.automatic_rule(text.split()) == rule


@pytest.mark.parametrize("text", ["on", "10", "0m", "0 cells", "-1m", "m", "cells", "10 apples"])
def test_an_invalid_interval_is_refused(text: str) -> None:
    with pytest.raises(
        ControlError, match="is not an interval: write 90s, 10m, 2h, 20 cells or off"
    ):
        magics.automatic_rule(text.split())


def test_intervals_are_shown() -> None:
    rule: AutomaticView = {"every": 0.0, "cells": 0, "keep": 3, "problem": ""}
    assert status_text.automatic_text(rule) == "Automatic checkpoints: off"
    for other, text in (
        (rule | {"every": 600.0}, "every 10 min; keeps the last 3"),
        (
            rule | {"every": 7200.0, "cells": 1, "keep": 1},
            "every 2 h or 1 cell; keeps the last 1",
        ),
        (rule | {"cells": 20}, "every 20 cells; keeps the last 3"),
        (rule | {"every": 90.0}, "every 90 s; keeps the last 3"),
    ):
        assert status_text.automatic_text(other) == f"Automatic checkpoints: {text}"
    said = status_text.automatic_text(rule | {"cells": 2, "problem": "The disk is full."})
    assert said.split("\n")[1:] == ["No automatic checkpoint: The disk is full."]


def test_the_end_of_a_run_is_known_from_the_best_source() -> None:
    runs = KernelRuns()
    for name in ("live", "crashed", "restarted"):
        runs.began(name)
    runs.ended("crashed", died=True)
    runs.ended("restarted", died=True)  # its connection ended,
    runs.ended("restarted", died=False)  # because its user had requested it
    assert set(runs.died) == {"crashed"}
    assert set(runs.live) == {"live"}
    for number in range(5000):
        runs.ended(f"r{number}", died=True)
    assert len(runs.died) == 1000
    assert "r4999" in runs.died
