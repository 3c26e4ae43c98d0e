"""*Time to GPU*: how long cells wait for a device, from the first operator to the lease."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from kernelproxy.common.protocol.views import WaitsView

BOUNDS = (
    0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
"""Seconds: upper bounds of the classes that waits are counted in; the last class has none."""

RECENT = 1000
"""Number of latest waits from which quantiles are computed."""


class WaitTimes:
    """The waits of one tier."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def note(self, seconds: float) -> None:
        """Count a wait."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds
        self._recent.append(seconds)

    def figures(self) -> WaitsView:
        """Return the statistics.

        Returns
        -------
        dict
            ``count`` and ``seconds`` of all waits; ``classes``: pairs of an upper bound in seconds
            (None: none) and the number of waits up to it; ``p50`` and ``p99`` of the last `RECENT`
            waits, in seconds.
        """
        classes, so_far = [], 0
        for bound, count in zip((*BOUNDS, None), self._counts, strict=True):
            so_far += count
            classes.append([bound, so_far])
        return {
            "count": so_far,
            "seconds": self._seconds,
            "classes": classes,
            "p50": self._quantile(0.50),
            "p99": self._quantile(0.99),
        }

    def _quantile(self, part: float) -> float:
        """Return the least wait that this part of the recent ones does not exceed; or 0."""
        if not self._recent:
            return 0.0
        known = sorted(self._recent)
        return known[min(len(known) - 1, int(part * len(known)))]


class TimeToGpu:
    """Waits of all sessions, from `begin` to the first `end` after it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._tiers: dict[str, WaitTimes] = {}

    def begin(self, session: str, at: float) -> None:
        """Record that a cell needs a device."""
        self._since[session] = at

    def end(self, session: str, tier: str, at: float) -> None:
        """Record that a session of this tier executes; it is counted only after a `begin`."""
        since = self._since.pop(session, None)
        if since is not None:
            self._tiers.setdefault(tier, WaitTimes()).note(at - since)

    def forget(self, session: str) -> None:
        """Forget a session: its cell is over, or it is closed."""
        self._since.pop(session, None)

    def figures(self) -> dict[str, WaitsView]:
        """Return `WaitTimes.figures` by tier."""
        return {tier: waits.figures() for tier, waits in sorted(self._tiers.items())}
