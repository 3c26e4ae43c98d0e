"""Interactivity: levels by the attained time of the running cell, and what keeps switches rare.

A cell begins at level 0 and sinks as it gets service; whoever has had less goes first. Nothing has
to be known about a cell in advance. Sources: multi-level feedback (Corbató 1962), least attained
service for devices (Tiresias, NSDI 2019); minimum run times as in KAI's `preemptMinRuntime`.
"""

from __future__ import annotations

from bisect import bisect_right

from jupyter_sing.scheduler.settings import Settings

AGING = 10.0
"""Quanta of waiting after which a session rises one level."""


def level_of(attained: float, settings: Settings) -> int:
    """Level of a cell that has had so many seconds."""
    return bisect_right(settings.levels, attained)


def level_end(attained: float, settings: Settings) -> float | None:
    """Seconds that a cell can still run until it sinks; None at the last level."""
    level = level_of(attained, settings)
    return settings.levels[level] - attained if level < len(settings.levels) else None


def run_min(level: int, switch: float, settings: Settings, floor: float | None = None) -> float:
    """Seconds for which a lease is not taken away, given the switch that it has cost.

    At the interactive levels a switch may cost half of the time that follows; below, by default, a
    fifteenth. With a twentieth, short cells wait noticeably longer where switches are slow, and
    long ones are done no sooner.
    """
    factor = 2.0 if level <= 1 else settings.run_min_switches
    return max(settings.run_min if floor is None else floor, factor * switch)


def turn_of(level: int, switch: float, settings: Settings) -> float:
    """Seconds of a turn at a level, given the switch that it has cost."""
    return max(settings.quanta[level], settings.turn_switches * switch)


class SwapBudget:
    """Share of a device's time that may go into switches: a token bucket, in seconds.

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
        """Let another share of the time go into switches from now on."""
        self._rate, self._size = rate, 60.0 * rate

    def spend(self, seconds: float, now: float) -> None:
        """Note a switch. Debts are limited to one bucket, that they end within two minutes."""
        self._fill(now)
        self._level = max(-self._size, self._level - seconds)

    def left(self, now: float) -> float:
        """Seconds of switches that are still allowed; negative while overdrawn."""
        self._fill(now)
        return self._level

    def restore(self, left: float, now: float) -> None:
        """Begin with so many seconds."""
        self._level, self._at = max(-self._size, min(self._size, left)), now

    def stretch(self, now: float) -> float:
        """Return by what quanta are multiplied at present: 1, or 2 while overdrawn."""
        self._fill(now)
        return 1.0 if self._level >= 0.0 else 2.0


class Gaps:
    """How soon a session will want its device again: a moving average of its think times."""

    __slots__ = ("_mean", "since")

    def __init__(self, at: float) -> None:
        self._mean = 60.0
        self.since = at

    def idle(self, now: float) -> None:
        """Note that a cell has finished."""
        self.since = now

    def used(self, now: float) -> None:
        """Note that the next one begins."""
        self._mean += 0.3 * (now - self.since - self._mean)

    def expected(self) -> float:
        """When the next cell is expected."""
        return self.since + self._mean

    def rate(self, now: float) -> float:
        """Expected uses per second. Whoever has been away for longer than usual stays away."""
        return 1.0 / max(1.0, self._mean, now - self.since)

    @property
    def known(self) -> tuple[float, float]:
        """Mean think time, and since when it is idle."""
        return self._mean, self.since

    def restore(self, mean: float, since: float) -> None:
        """Begin with what `known` was."""
        self._mean, self.since = mean, since
