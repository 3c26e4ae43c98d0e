"""Interactivity: levels by the attained time of the running cell, and what keeps switches rare.

A cell begins at level 0 and sinks as it gets service; the cell with the least service goes first.
Nothing has to be known about a cell in advance. Sources: multi-level feedback (Corbató 1962), least
attained service for devices (Tiresias, NSDI 2019); minimum run times as in KAI's
`preemptMinRuntime`.
"""

from __future__ import annotations

from bisect import bisect_right

from jupyter_sing.scheduler.settings import EngineSettings

AGING = 10.0
"""Waiting time, in quanta, after which a session rises one level."""


def level_of(attained: float, settings: EngineSettings) -> int:
    """Return the level of a cell that has attained this many seconds."""
    return bisect_right(settings.levels, attained)


def level_end(attained: float, settings: EngineSettings) -> float | None:
    """Return the seconds that a cell can still run until it sinks; None at the last level."""
    level = level_of(attained, settings)
    return settings.levels[level] - attained if level < len(settings.levels) else None


def run_min(
    level: int, switch: float, settings: EngineSettings, floor: float | None = None
) -> float:
    """Return the minimum run time of a lease in seconds, given the switch that it has cost.

    At the interactive levels a switch may cost half of the time that follows; below, by default, a
    fifteenth. With a twentieth, short cells wait noticeably longer where switches are slow, and
    long ones are done no sooner.
    """
    factor = 2.0 if level <= 1 else settings.run_min_switches
    return max(settings.run_min if floor is None else floor, factor * switch)


def turn_of(level: int, switch: float, settings: EngineSettings) -> float:
    """Return the quantum at a level in seconds, given the switch that it has cost."""
    return max(settings.quanta[level], settings.turn_switches * switch)


class SwapBudget:
    """Share of a device's time that may be spent on switches: a token bucket, in seconds.

    Switches are never refused. While the bucket is overdrawn, quanta on that device are longer.
    """

    __slots__ = ("_at", "_level", "_rate", "_size")

    def __init__(self, rate: float, at: float = 0.0) -> None:
        self._rate = rate
        self._size = 60.0 * rate
        self._level = self._size
        self._at = at

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + self._rate * (now - self._at))
        self._at = now

    def set_rate(self, rate: float) -> None:
        """Set the share of the time that may be spent on switches."""
        self._rate, self._size = rate, 60.0 * rate

    def spend(self, seconds: float, now: float) -> None:
        """Charge a switch. Debts are limited to one bucket, so that they end within two minutes."""
        self._fill(now)
        self._level = max(-self._size, self._level - seconds)

    def left(self, now: float) -> float:
        """Return the seconds of switches that are still allowed; negative while overdrawn."""
        self._fill(now)
        return self._level

    def restore(self, left: float, now: float) -> None:
        """Set the seconds that are left."""
        self._level, self._at = max(-self._size, min(self._size, left)), now

    def stretch(self, now: float) -> float:
        """Return the present factor of quanta: 1, or 2 while overdrawn."""
        self._fill(now)
        return 1.0 if self._level >= 0.0 else 2.0


class Gaps:
    """Moving average of a session's think times: how soon it will need its device again."""

    __slots__ = ("_mean", "since")

    def __init__(self, at: float) -> None:
        self._mean = 60.0
        self.since = at

    def idle(self, now: float) -> None:
        """Record that a cell has finished."""
        self.since = now

    def used(self, now: float) -> None:
        """Record that the next cell begins."""
        self._mean += 0.3 * (now - self.since - self._mean)

    def expected(self) -> float:
        """Return when the next cell is expected."""
        return self.since + self._mean

    def rate(self, now: float) -> float:
        """Return the expected uses per second; fewer if the session is idle longer than usual."""
        return 1.0 / max(1.0, self._mean, now - self.since)

    @property
    def known(self) -> tuple[float, float]:
        """Mean think time, and since when the session is idle."""
        return self._mean, self.since

    def restore(self, mean: float, since: float) -> None:
        """Continue from what `known` was."""
        self._mean, self.since = mean, since
