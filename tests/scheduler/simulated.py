"""Small workloads and clusters to test the simulator with, and an audit of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from jupyter_sing.scheduler.decisions import Decision, Grant
from jupyter_sing.scheduler.events import (
    CellFinished,
    Event,
    Released,
    Started,
)
from jupyter_sing.scheduler.ids import DeviceId, SessionId
from jupyter_sing.simulator.cluster import SimulatedCluster
from jupyter_sing.simulator.outcome import CellRecord, SimulationOutcome
from jupyter_sing.simulator.run import Scheduler, Simulation
from jupyter_sing.simulator.workload import GB, Cell, SimulatedSession, Workload, arranged


def session(
    name: str, *cells: tuple[float, float], gpus: int = 1, memory: int = GB
) -> SimulatedSession:
    """A session of (think, duration) in seconds."""
    return SimulatedSession(name, gpus, memory, tuple(Cell(*cell) for cell in cells))


def instant(gpus: int, **changes: float) -> SimulatedCluster:
    """Return a cluster on which only cells take time; `changes` overrides that."""
    values = {"switch": 0.0, "suspend": 0.0, "bandwidth": 1e30, **changes}
    return SimulatedCluster(gpus, **values)  # type: ignore[arg-type]


def chance(seed: int, sessions: int = 12, gpus_max: int = 1) -> Workload:
    """Return a workload under contention, with memory that does not fit all at once."""
    random = Random(seed)

    def one(index: int) -> SimulatedSession:
        cells = [
            (60 * random.random(), 0.5 + 200 * random.random() ** 4)
            for _ in range(1 + int(12 * random.random()))
        ]
        gpus = 1 + int(gpus_max * random.random())
        return session(f"s{index}", *cells, gpus=gpus, memory=int((1 + 22 * random.random()) * GB))

    return arranged(one(index) for index in range(sessions))


class Audit:
    """Scheduler wrapper that records which session held which device, from when to when.

    Attributes
    ----------
    held : list of (device, session, float, float)
        From the grant to its end.
    executed : dict of session to float
        Seconds between `Started` and the end of leases.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._granted: dict[SessionId, tuple[float, tuple[DeviceId, ...]]] = {}
        self._started: dict[SessionId, float] = {}
        self.held: list[tuple[DeviceId, SessionId, float, float]] = []
        self.executed: dict[SessionId, float] = {}
        self.events: list[Event] = []
        self.decisions: list[tuple[float, Decision]] = []

    def next_tick(self) -> float | None:
        """Forward to the wrapped scheduler."""
        return self._scheduler.next_tick()

    def handle(self, event: Event) -> Sequence[Decision]:
        """Record an event, and forward it."""
        self.events.append(event)
        if isinstance(event, Started):
            self._started[event.session] = event.at
        if isinstance(event, CellFinished | Released):
            since, devices = self._granted.pop(event.session)
            self.held += [(device, event.session, since, event.at) for device in devices]
            begin = self._started.pop(event.session, event.at)
            done = self.executed.get(event.session, 0.0)
            self.executed[event.session] = done + event.at - begin
        decisions = self._scheduler.handle(event)
        for decision in decisions:
            self.decisions.append((event.at, decision))
            if isinstance(decision, Grant):
                self._granted[decision.session] = event.at, decision.devices
        return decisions


def run(workload: Workload, cluster: SimulatedCluster, scheduler: Scheduler) -> SimulationOutcome:
    """Run to the end."""
    return Simulation(workload, cluster, scheduler).run()


def cells_of(outcome: SimulationOutcome, name: str) -> list[CellRecord]:
    """The cells of a session, in order."""
    return [cell for cell in outcome.cells if cell.session == name]


def waits(outcome: SimulationOutcome, name: str) -> list[float]:
    """Return the times to GPU of a session's cells."""
    return [round(cell.time_to_gpu, 6) for cell in cells_of(outcome, name)]


def ends(outcome: SimulationOutcome, name: str) -> list[float]:
    """Return when a session's cells ended."""
    return [round(cell.finished, 6) for cell in cells_of(outcome, name)]
