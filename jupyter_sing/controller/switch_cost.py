"""Estimate of how long switching a session onto a device takes, fitted to measurements.

The model is a constant plus a time per byte. Both are the median over pairs of measurements (Theil
1950, Sen 1968): a few outliers, from a busy disk or a process that had to start, change nothing.
Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: Number of newest measurements that are used, and number of them needed for an estimate.
KEPT, ENOUGH = 24, 5
#: Sizes that differ by less say nothing about the rate.
BYTES_APART = 16 << 20
#: A new estimate is reported when it differs by this fraction.
CHANGE = 0.2
#: Least and greatest plausible rate of a device, in bytes per second.
RATES = (1e7, 1e13)


@dataclass(frozen=True)
class Rate:
    """A switch takes ``constant_seconds + nbytes / bytes_per_second``."""

    bytes_per_second: float
    constant_seconds: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that a switch of this many bytes takes."""
        return self.constant_seconds + nbytes / self.bytes_per_second


class Bandwidth:
    """Estimate for one device.

    Parameters
    ----------
    believed : Rate
        Initial estimate, used until there are measurements.
    """

    def __init__(self, believed: Rate) -> None:
        self.believed = believed
        self._measured: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def measured(self, nbytes: int, seconds: float) -> Rate | None:
        """Record a switch; return the new estimate if it differs from the present one."""
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
