"""Watchdog for workers: how long one may keep others waiting for its device.

Note [Patience]: a worker yields between two operators, so it may keep others waiting for as long as
one operator takes. A worker that is stopped by a signal, or asleep in the middle of an operator,
counts as hanging after a few seconds without any processor time. A worker that works gets minutes:
its operator is long, or waits for a compiler. A worker that runs out of time is ended; its session
is rebuilt from the newest snapshot and the log, so only time is lost. An operator that is merely
long would be ended again in each turn, so both time limits double with every worker of a session
that was ended like this.

A worker that has work and was stopped by a signal is also ended if no other session waits, after
twelve times as long: otherwise no user would learn that it waits for a signal to continue.

The worker of a session that could not be rebuilt is never ended for the sake of others. Nor is one
that waits for parts of its state from disk, because this process reads them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: How often both time limits double at most.
DOUBLINGS_MAX = 6
#: Number of checks within the shorter time limit.
CHECKS = 10
#: How many times the shorter limit a stopped worker has if no other session waits.
ALONE = 12.0
#: Deepest level of child processes that is counted; a compiler has three levels.
_DEPTH_MAX = 8
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessActivity:
    """Activity of a process.

    Parameters
    ----------
    state : str
        A letter, as in ``/proc/PID/stat``.
    seconds : float
        Processor time of all its threads, and of the processes that it has started.
    """

    state: str
    seconds: float


def activity(pid: int) -> ProcessActivity | None:
    """Return the activity of a process; None if it has ended."""
    found = _own_activity(pid)
    if found is None:
        return None
    return ProcessActivity(
        found.state, found.seconds + sum(_seconds(child) for child in _children(pid))
    )


def _own_activity(pid: int) -> ProcessActivity | None:
    """Return the activity of a process alone, with the time of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessActivity(fields[0], sum(map(int, fields[11:15])) * _TICK_SECONDS)


def _seconds(pid: int, depth: int = 0) -> float:
    """Return the processor time of a process and of those that it has started."""
    found = _own_activity(pid)
    if found is None or depth > _DEPTH_MAX:
        return 0.0
    return found.seconds + sum(_seconds(child, depth + 1) for child in _children(pid))


def _children(pid: int) -> list[int]:
    """Return the children of a process that have not ended; not every system lists them."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(child) for child in task.read_text().split()]
    return children


class Watchdog:
    """Time limits for one session's workers.

    Parameters
    ----------
    still_seconds : float
        For a worker that does nothing.
    busy_seconds : float
        For a worker that works on one operator.
    """

    def __init__(self, still_seconds: float, busy_seconds: float) -> None:
        self._still, self._busy = still_seconds, busy_seconds
        self._lost = 0
        #: Returns True if there is no limit for a worker; see Note [Patience].
        self.endless: Callable[[], bool] = lambda: False

    @property
    def still_seconds(self) -> float:
        """Seconds for a worker that does nothing."""
        return self._still * 2.0 ** min(self._lost, DOUBLINGS_MAX)

    @property
    def busy_seconds(self) -> float:
        """Seconds for a worker that works."""
        return self._busy * 2.0 ** min(self._lost, DOUBLINGS_MAX)

    def lose(self) -> None:
        """Note that a worker was ended, which doubles the limits."""
        self._lost += 1


class WatchedWait:
    """One wait for a worker.

    Parameters
    ----------
    watchdog : Watchdog
    bounded : bool
        True if it may take `busy_seconds` at most while it works.
    now : float, optional
        Seconds of the monotonic clock.
    """

    def __init__(self, watchdog: Watchdog, *, bounded: bool, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self._watchdog, self._bounded = watchdog, bounded
        self._started_at = self._moved = now
        self._seconds: float | None = None

    def check(self, now: float, seen: ProcessActivity) -> str:
        """Return why the worker must be ended, as a clause; "" while it need not be."""
        # The time can decrease: when a child ends for which the worker does not wait.
        moved = self._seconds is not None and seen.seconds != self._seconds
        if moved or self._seconds is None:
            self._seconds = seen.seconds
        if moved or seen.state in "RD":  # D: in the OS kernel, which works for it
            self._moved = now
        still, busy = self._watchdog.still_seconds, self._watchdog.busy_seconds
        if now - self._moved >= still:
            what = "was stopped by a signal" if seen.state in "Tt" else "did nothing"
            return f"Its device process {what} while others waited for {still:g} s"
        if self._bounded and now - self._started_at >= busy:
            return f"One operation kept others waiting for {busy:g} s"
        return ""


class StoppedTime:
    """Watch over a worker that a signal may have stopped.

    Parameters
    ----------
    watchdog : Watchdog
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._since: float | None = None

    def check(self, now: float, seen: ProcessActivity | None) -> str:
        """Return why the worker must be ended, as a clause; "" while it need not be.

        Parameters
        ----------
        now : float
            Seconds of the monotonic clock.
        seen : ProcessActivity or None
            Its activity; None: it does not matter now.
        """
        if seen is None or seen.state != "T":  # t: a debugger traces it, whose user knows
            self._since = None
            return ""
        self._since = now if self._since is None else self._since
        limit = ALONE * self._watchdog.still_seconds
        if now - self._since < limit:
            return ""
        return f"Its device process was stopped by a signal for {limit:g} s"
