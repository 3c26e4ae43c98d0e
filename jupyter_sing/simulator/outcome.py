"""Records of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from jupyter_sing.scheduler.ids import SessionId
from jupyter_sing.scheduler.settings import Tier

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class CellRecord:
    """One cell. Times in seconds.

    Parameters
    ----------
    session : str
    gpus : int
    duration : float
        How long it had to compute, and did.
    submitted, started, finished : float
        `started`: when it executed first.
    """

    session: SessionId
    gpus: int
    duration: float
    submitted: float
    started: float
    finished: float

    @property
    def time_to_gpu(self) -> float:
        """Seconds from its submission until it executed."""
        return self.started - self.submitted


@dataclass(slots=True)
class SessionRecord:
    """One session.

    Parameters
    ----------
    session : str
    gpus : int
    tier : Tier
    weight : float
    opened, closed : float
    alone : float
        Seconds that it would have taken with devices of its own.
    executed, runnable : float
        Seconds in which it executed, and in which it had a cell.
    demand : float
        Mean, over its life, of the devices that all sessions together needed.
    hours : dict of int to [float, float]
        By hour of the simulation: seconds runnable and seconds executed.
    vc : str
    """

    session: SessionId
    gpus: int
    tier: Tier
    weight: float
    opened: float
    closed: float = 0.0
    alone: float = 0.0
    executed: float = 0.0
    runnable: float = 0.0
    demand: float = 0.0
    hours: dict[int, list[float]] = field(default_factory=dict)
    vc: str = "default"

    def note_runnable(self, begin: float, end: float) -> None:
        """Record that it had a cell."""
        self.runnable += end - begin
        for hour, seconds in _by_hour(begin, end):
            self.hours.setdefault(hour, [0.0, 0.0])[0] += seconds

    def note_executed(self, begin: float, end: float) -> None:
        """Record that it executed."""
        for hour, seconds in _by_hour(begin, end):
            self.hours.setdefault(hour, [0.0, 0.0])[1] += seconds


def _by_hour(begin: float, end: float) -> Iterator[tuple[int, float]]:
    hour = int(begin // HOUR)
    while begin < end:
        edge = min(end, (hour + 1) * HOUR)
        yield hour, edge - begin
        begin, hour = edge, hour + 1


@dataclass(slots=True)
class SimulationOutcome:
    """A whole simulation. Device-seconds count a second on n devices n times.

    Parameters
    ----------
    gpus : int
    cells : list of CellRecord
        In the order in which they finished.
    sessions : list of SessionRecord
        In the order in which they opened.
    finished : float
        When the last cell finished.
    executed : float
        Device-seconds of execution.
    switching : float
        Device-seconds in which devices were granted and did not execute yet.
    charged : float
        Device-seconds in which devices were granted.
    swaps : int
        Loads of sessions that had been on a device before.
    moved : int
        Bytes transferred to and from devices.
    preemptions : int
    fragmented : float
        Device-seconds that were free and of no use (`fragmentation.py`).
    """

    gpus: int
    cells: list[CellRecord] = field(default_factory=list)
    sessions: list[SessionRecord] = field(default_factory=list)
    finished: float = 0.0
    executed: float = 0.0
    switching: float = 0.0
    charged: float = 0.0
    swaps: int = 0
    moved: int = 0
    preemptions: int = 0
    fragmented: float = 0.0
