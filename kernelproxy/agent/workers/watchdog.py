"""How long a worker may keep others waiting that are to have its device.

Note [Patience]: a worker gives way between two operators, so it may keep others waiting for as long
as one operator takes. One that is stopped by a signal, or asleep in the middle of an operator, is
taken to hang after a few seconds without any processor time. One that works gets minutes: its
operator is long, or waits for a compiler. Whoever is out of time is ended; its session is rebuilt
from the newest snapshot and the log, so nothing is lost but time. An operator that is merely long
would be ended again in each turn, so both times double with every worker of a session that was
ended like this.

One that a signal has stopped is ended also if nobody else waits, after twelve times as long, if it
has work: nobody would ever know that it waits for a signal to go on.

A session that could not be rebuilt is never ended for others' sake. Nor is one that waits for parts
of its state to come from disk: who reads them is this process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: How often both times double at most.
DOUBLINGS_MAX = 6
#: Looks within the shorter time.
LOOKS = 10
#: How many times the shorter time a stopped worker has if nobody else waits.
ALONE = 12.0
#: Of processes that start others; a compiler's are three.
_DEPTH_MAX = 8
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """What a process does.

    Parameters
    ----------
    state : str
        A letter, as in ``/proc/PID/stat``.
    seconds : float
        Of processor time that all its threads, and processes that it has started, have had.
    """

    state: str
    seconds: float


def activity(pid: int) -> Activity | None:
    """Look what a process does; None if it has ended."""
    found = _look(pid)
    if found is None:
        return None
    return Activity(found.state, found.seconds + sum(_seconds(child) for child in _children(pid)))


def _look(pid: int) -> Activity | None:
    """What a process does by itself, with the time of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Activity(fields[0], sum(map(int, fields[11:15])) * _TICK_SECONDS)


def _seconds(pid: int, depth: int = 0) -> float:
    """Processor time of a process and those that it has started."""
    found = _look(pid)
    if found is None or depth > _DEPTH_MAX:
        return 0.0
    return found.seconds + sum(_seconds(child, depth + 1) for child in _children(pid))


def _children(pid: int) -> list[int]:
    """Processes that one has started and that have not ended; not every system tells."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(child) for child in task.read_text().split()]
    return children


class Patience:
    """The patience with one session's workers.

    Parameters
    ----------
    still_seconds : float
        For one that does nothing.
    busy_seconds : float
        For one that works on one operator.
    """

    def __init__(self, still_seconds: float, busy_seconds: float) -> None:
        self._still, self._busy = still_seconds, busy_seconds
        self._lost = 0
        #: Whether a worker is waited for as long as it takes; see Note [Patience].
        self.endless: Callable[[], bool] = lambda: False

    @property
    def still_seconds(self) -> float:
        """Seconds for one that does nothing."""
        return self._still * 2.0 ** min(self._lost, DOUBLINGS_MAX)

    @property
    def busy_seconds(self) -> float:
        """Seconds for one that works."""
        return self._busy * 2.0 ** min(self._lost, DOUBLINGS_MAX)

    def lose(self) -> None:
        """A worker was ended."""
        self._lost += 1


class Wait:
    """One wait for a worker.

    Parameters
    ----------
    patience : Patience
    bounded : bool
        Whether it may take `busy_seconds` at most while it works.
    now : float, optional
        Seconds of the monotonic clock.
    """

    def __init__(self, patience: Patience, *, bounded: bool, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self._patience, self._bounded = patience, bounded
        self._begun = self._moved = now
        self._seconds: float | None = None

    def look(self, now: float, seen: Activity) -> str:
        """Return why the worker is to be ended, as a clause; "" while it is not."""
        # Less: a process that it had started was not waited for by it.
        moved = self._seconds is not None and seen.seconds != self._seconds
        if moved or self._seconds is None:
            self._seconds = seen.seconds
        if moved or seen.state in "RD":  # D: in the system, which is at work for it
            self._moved = now
        still, busy = self._patience.still_seconds, self._patience.busy_seconds
        if now - self._moved >= still:
            what = "was stopped by a signal" if seen.state in "Tt" else "did nothing"
            return f"Its device process {what} while others waited for {still:g} s"
        if self._bounded and now - self._begun >= busy:
            return f"One operation kept others waiting for {busy:g} s"
        return ""


class Stopped:
    """One watch over a worker that may be stopped by a signal.

    Parameters
    ----------
    patience : Patience
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since: float | None = None

    def look(self, now: float, seen: Activity | None) -> str:
        """Return why the worker is to be ended, as a clause; "" while it is not.

        Parameters
        ----------
        now : float
            Seconds of the monotonic clock.
        seen : Activity or None
            What it does; None: it does not matter.
        """
        if seen is None or seen.state != "T":  # t: somebody traces it, and knows
            self._since = None
            return ""
        self._since = now if self._since is None else self._since
        limit = ALONE * self._patience.still_seconds
        if now - self._since < limit:
            return ""
        return f"Its device process was stopped by a signal for {limit:g} s"
