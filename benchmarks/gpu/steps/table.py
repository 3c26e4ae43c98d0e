"""The steps of the GPU suite, in the order of what their results are worth, with their seconds.

Each is a function of a `Suite` that returns its result, as a text or as a text with a table and
figures, or raises `FailedError` or `SkippedError`. They add up to a little more than the whole run
may take, as few steps need all of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.processes import Suite
from benchmarks.gpu.steps import (
    bypassing,
    correctness,
    device_faults,
    jobs,
    machine,
    memory,
    recovery,
    sharing,
    speed,
    states,
)

STEPS: list[tuple[str, float, Callable[[Suite], Any]]] = [
    ("machine", 30, machine.describe),
    ("build", 75, machine.build),
    ("first light", 25, machine.first_light),
    ("families", 45, correctness.operator_families),
    ("faults", 90, device_faults.faults),
    ("moves", 40, states.moves),
    ("memory", 45, memory.shared_memory),
    ("ranks", 90, jobs.ranks),
    ("bypass", 30, bypassing.bypass),
    ("speed", 70, speed.programs),
    ("snapshots", 35, states.snapshots_beside),
    ("recovery", 40, recovery.kills),
    ("turns", 30, sharing.turns),
    ("compile", 35, speed.compilation),
    ("surface", 30, correctness.surface),
    ("training", 40, correctness.training),
    ("behaviours", 90, correctness.behaviours),
]
