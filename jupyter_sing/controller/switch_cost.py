"""What bringing a session onto a device takes, found from what it took.

Seconds are believed to be a constant and so many per byte. Both are the median of what pairs of
measurements say (Theil 1950, Sen 1968): a few that met a busy disk or a process that had to start
change nothing. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: Measurements that are looked at, the newest ones, and before how many nothing is believed.
KEPT, ENOUGH = 24, 5
#: Sizes that differ by less tell nothing about the rate.
BYTES_APART = 16 << 20
#: What is believed is told again when it says something else by so much.
CHANGE = 0.2
#: No device copies more slowly or faster than that, in bytes per second.
RATES = (1e7, 1e13)


@dataclass(frozen=True)
class Rate:
    """A switch takes ``constant_seconds + nbytes / bytes_per_second``."""

    bytes_per_second: float
    constant_seconds: float

    def seconds(self, nbytes: float) -> float:
        """How long one of so many bytes takes."""
        return self.constant_seconds + nbytes / self.bytes_per_second


class Bandwidth:
    """What is known of one device.

    Parameters
    ----------
    believed : Rate
        Until something else was measured.
    """

    def __init__(self, believed: Rate) -> None:
        self.believed = believed
        self._measured: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def measured(self, nbytes: int, seconds: float) -> Rate | None:
        """Take note of a switch; return what is believed from now on, if that is something else."""
        self._measured.append((float(nbytes), seconds))
        if len(self._measured) < ENOUGH:
            return None
        found = self._fit()
        sizes = [size for size, _ in self._measured]
        for size in (min(sizes), max(sizes)):
            before = self.believed.seconds(size)
            if abs(found.seconds(size) - before) > CHANGE * before:
                self.believed = found
                return found
        return None

    def _fit(self) -> Rate:
        slopes = [
            (one[1] - other[1]) / (one[0] - other[0])
            for one, other in combinations(self._measured, 2)
            if abs(one[0] - other[0]) >= BYTES_APART
        ]
        rate = self.believed.bytes_per_second
        if len(slopes) >= ENOUGH:
            slope = median(slopes)
            slowest, fastest = RATES
            rate = min(max(1.0 / slope, slowest), fastest) if slope > 0.0 else fastest
        rest = median(seconds - size / rate for size, seconds in self._measured)
        return Rate(rate, max(rest, 0.0))
