"""Placement of chains of cells in the time that a workload covers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from jupyter_sing.simulator.workload import Cell

Placed: TypeAlias = tuple[float, float]
"""Start of a cell if none ever waited, and its duration; in seconds."""


def placed(cells: Sequence[Cell], span: float, position: float) -> list[list[Placed]]:
    """Place a chain at a position of the span; what exceeds the end wraps around.

    So the load is the same at all times. The part at the beginning is another session, as if the
    window had been cut out of a longer time. A cell that would exceed the end is moved to the
    beginning. In a chain longer than the span, think times are shortened. The pause before the
    first cell is left out.

    Returns
    -------
    list of list of (float, float)
        One or two sessions.
    """
    work = math.fsum(cell.duration for cell in cells)
    thinking = math.fsum(cell.think for cell in cells[1:])
    factor = min(1.0, max(0.0, span - work) / thinking) if thinking else 1.0
    starts, now = [], position * span
    for i, cell in enumerate(cells):
        now += cell.think * factor if i else 0.0
        starts.append(now)
        now += cell.duration
    cut = next((i for i, cell in enumerate(cells) if starts[i] + cell.duration > span), len(cells))
    late = max(0.0, span - starts[cut]) if cut < len(cells) else 0.0
    whole = [(start + late, cell.duration) for start, cell in zip(starts, cells, strict=True)]
    wrapped = [(max(0.0, start - span), duration) for start, duration in whole[cut:]]
    return [part for part in (whole[:cut], wrapped) if part]


def parted(sessions: Sequence[list[Placed]], count: int) -> list[list[Placed]]:
    """Split sessions at their longest absences, or join successive ones, to get this many."""
    parts = list(sessions)
    while len(parts) < count:
        absence, index, at = max(
            (part[i][0] - part[i - 1][0] - part[i - 1][1], -index, -i)
            for index, part in enumerate(parts)
            for i in range(1, len(part))
        )
        del absence
        part = parts[-index]
        parts[-index : -index + 1] = [part[:-at], part[-at:]]
    while len(parts) > count:
        parts.sort(key=lambda part: part[-1][0] + part[-1][1])
        follower = next(
            (i for i, part in enumerate(parts) if part[0][0] >= parts[0][-1][0] + parts[0][-1][1]),
            None,
        )
        if follower is None:
            raise ValueError("So few sessions cannot run so many cells in that time.")
        parts[0] = parts[0] + parts.pop(follower)
    return parts
