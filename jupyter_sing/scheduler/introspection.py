"""What a session's log says of its progress: its step, how long one takes, where memory is least.

A training program issues the same operators again and again. A stretch of the log that repeats is a
step; how fast steps follow each other is progress that needs no cooperation of the program, and the
point of a step where least memory is in use is the cheapest one to stop at. Gandiva (OSDI 2018)
finds both from memory alone; a log of operators says it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

REPEATS_MIN = 3
"""Repetitions after which a stretch counts as a step."""

AGREEMENT = 0.9
"""Share of records that have to be the same one period later: real programs print now and then."""


@dataclass(frozen=True, slots=True)
class Digest:
    """One record of a log.

    `kind` is the same for the same operator on the same shapes; `memory` is what live storages have
    after it, in bytes.
    """

    at: float
    kind: int
    memory: int


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The step of a session.

    Attributes
    ----------
    records
        Length of a step.
    step_seconds
        Median time that a step takes.
    nadir
        Where in a step memory is least, as a fraction of its records, in [0, 1). Steps are counted
        from the end of the stretch.
    memory_min, memory_max
        Bytes within the last step.
    """

    records: int
    step_seconds: float
    nadir: float
    memory_min: int
    memory_max: int


def rhythm(digests: Sequence[Digest]) -> Rhythm | None:
    """Find the step that a stretch of log ends with.

    Parameters
    ----------
    digests
        Consecutive records, oldest first; a few thousand are enough.

    Returns
    -------
    Rhythm or None
        None if nothing repeats at least `REPEATS_MIN` times.

    Notes
    -----
    The candidates for a period are the distances at which the last kind of record occurred before,
    shortest first, so that cost is proportional to the length times the number of candidates that
    fail; a candidate is given up at its first tenth of disagreement.
    """
    period = _period([digest.kind for digest in digests])
    if period is None:
        return None
    ends = [digests[i].at for i in range(len(digests) - 1, -1, -period)]
    steps = sorted(late - early for late, early in pairwise(ends))
    last = digests[-period:]
    least = min(range(period), key=lambda i: last[i].memory)
    return Rhythm(
        period,
        steps[len(steps) // 2],
        least / period,
        last[least].memory,
        max(digest.memory for digest in last),
    )


def _period(kinds: Sequence[int]) -> int | None:
    """Shortest distance at which the end of the stretch repeats itself often enough."""
    count = len(kinds)
    for period in range(1, count // REPEATS_MIN + 1):
        if kinds[count - 1 - period] == kinds[-1] and _repeats(kinds, period):
            return period
    return None


def _repeats(kinds: Sequence[int], period: int) -> bool:
    compared = period * (REPEATS_MIN - 1)
    allowed = int((1.0 - AGREEMENT) * compared)
    first = len(kinds) - compared
    for i in range(len(kinds) - 1, first - 1, -1):
        if kinds[i] != kinds[i - period]:
            allowed -= 1
            if allowed < 0:
                return False
    return True
