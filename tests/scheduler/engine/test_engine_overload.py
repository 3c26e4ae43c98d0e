"""A lab with three times the load of its devices: every session is served repeatedly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from jupyter_sing.scheduler.decisions import Decision
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.events import (
    CellFinished,
    CellSubmitted,
    Event,
    Released,
    Started,
)
from jupyter_sing.scheduler.ids import SessionId
from jupyter_sing.scheduler.policy import parse
from jupyter_sing.simulator.cluster import SimulatedCluster
from jupyter_sing.simulator.run import Simulation
from jupyter_sing.simulator.users import simulated_policy
from jupyter_sing.simulator.workload import GB, Cell, SimulatedSession, Workload, arranged

LAB = Path(__file__).resolve().parents[3] / "docs" / "policies" / "lab.yaml"
NAMES = [
    "ada", "grace", "robot", "edsger", "barbara", "dr-ann", "dr-bob",
    *(f"s{number}" for number in range(11)), "visitor1", "visitor2",
]  # fmt: skip
DAY = 86_400.0
HOUR = 3_600.0


def lab(days: float, load: float, seed: int) -> Workload:
    """Return twenty users who think and compute for some minutes each; `load` devices in total."""
    random = Random(seed)

    def one(name: str) -> SimulatedSession:
        cells, now = [], 0.0
        while now < days * DAY:
            seconds = min(4 * HOUR, random.lognormvariate(5.0, 1.6))
            share = load / len(NAMES)
            think = random.expovariate(share / (1.0 - share) / 600.0)
            cells.append(Cell(think, seconds))
            now += think + seconds
        return SimulatedSession(f"{name}/1", 1, 6 * GB, tuple(cells))

    return arranged(one(name) for name in NAMES)


class WaitRecorder:
    """Scheduler wrapper that records how long each session has waited for a device.

    Attributes
    ----------
    longest
        By session, the longest time without service: (seconds, since when).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.since: dict[SessionId, float] = {}
        self.longest: dict[SessionId, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.executed: dict[SessionId, float] = defaultdict(float)
        self._started: dict[SessionId, float] = {}

    def next_tick(self) -> float | None:
        return self.engine.next_tick()

    def handle(self, event: Event) -> Sequence[Decision]:
        if isinstance(event, CellSubmitted | Released):
            self.since[event.session] = event.at
        elif isinstance(event, Started | CellFinished):
            self.ended(event.session, event.at)
        if isinstance(event, Started):
            self._started[event.session] = event.at
        elif isinstance(event, CellFinished | Released):
            begun = self._started.pop(event.session, event.at)
            self.executed[event.session] += event.at - begun
        return self.engine.handle(event)

    def ended(self, session: SessionId, at: float) -> None:
        if session in self.since:
            since = self.since.pop(session)
            self.longest[session] = max(self.longest[session], (at - since, since))


def simulated(days: float, seed: int = 1) -> WaitRecorder:
    """Return the users of the lab on two devices instead of four, at three times their capacity."""
    workload, cluster = lab(days, 6.0, seed), SimulatedCluster(2)
    simulated = simulated_policy(parse(LAB.read_text()), workload, cluster.devices())
    between = WaitRecorder(Engine(cluster.devices(), simulated.settings, simulated.leases))
    Simulation(workload, cluster, between, simulated.of).run()
    return between


@pytest.mark.slow
def test_sessions_do_not_starve_at_three_times_the_load() -> None:
    found = simulated(days=1.0)
    assert set(found.longest) == {f"{name}/1" for name in NAMES}
    assert all(seconds > HOUR for seconds in found.executed.values())
    for session, (seconds, _) in found.longest.items():
        # A waiting session rises a level every ten quanta, and is first then. Visitors have two
        # hours a day, and wait for the next day when these are used up.
        bound = DAY + HOUR if session.startswith("visitor") else 4 * HOUR
        assert seconds < bound, session
