"""Simulation of a workload under a scheduler in virtual time.

The scheduler is any object with the engine's interface: events go in, decisions come out, and the
simulation carries them out. It is strict: a decision that is impossible on real devices is a
`SimulationError`, for every scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from jupyter_sing.scheduler.decisions import (
    Decision,
    Evict,
    Grant,
    GuaranteeChanged,
    MigrateMemory,
    Pack,
    Preempt,
    PrepareResize,
    Queued,
    Unpack,
)
from jupyter_sing.scheduler.events import (
    CellFinished,
    CellSubmitted,
    Event,
    SessionAdded,
    SessionRemoved,
    Tick,
)
from jupyter_sing.scheduler.gangs.ranks import per_device, sizes
from jupyter_sing.scheduler.ids import SessionId
from jupyter_sing.scheduler.settings import Tier
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulatedDevices, SimulationError
from jupyter_sing.simulator.execution import SimulatedLeases, SimulatedMemory
from jupyter_sing.simulator.outcome import CellRecord, SessionRecord, SimulationOutcome
from jupyter_sing.simulator.workload import SimulatedSession, Workload
from jupyter_sing.simulator.world import SessionRun, SimulatedWorld

TICKS_IN_VAIN_MAX = 10_000


class Scheduler(Protocol):
    """Interface of what can be simulated: the engine, and every baseline."""

    def handle(self, event: Event) -> Sequence[Decision]:
        """Handle an event and return the decisions."""
        ...

    def next_tick(self) -> float | None:
        """Return when it needs a `Tick`, if no event comes before."""
        ...


@dataclass(frozen=True)
class SimulatedTerms:
    """Owner of a session, its tier and its weight."""

    vc: str
    user: str
    tier: Tier = Tier.STANDARD
    weight: float = 1.0


def equals(session: SimulatedSession) -> SimulatedTerms:
    """Return the terms of a session with a user of its own; all have the same rights."""
    return SimulatedTerms("default", session.name)


class Simulation:
    """One workload, one scheduler, one run.

    Parameters
    ----------
    workload : Workload
    cluster : SimulatedCluster
    scheduler : Scheduler
        A new one: it has received no event.
    terms : callable, optional
        Returns the `SimulatedTerms` of a session.
    show : callable, optional
        Called with the number of finished cells and of all, now and then.

    Raises
    ------
    SimulationError
        A session can never run on this cluster.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: SimulatedCluster,
        scheduler: Scheduler,
        terms: Callable[[SimulatedSession], SimulatedTerms] = equals,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        widest = max(Counter(device.node for device in cluster.devices()).values())
        for session in workload.sessions:
            needs = session.gpus_min or session.gpus
            if needs > cluster.gpus:
                raise SimulationError(
                    f"Session {session.name} needs {needs} devices of {cluster.gpus}."
                )
            if needs > widest:
                raise SimulationError(
                    f"Session {session.name} needs {needs} devices at once, and a host has "
                    f"{widest} at most."
                )
            memory = session.memory * per_device(session.gpus, min(session.gpus, widest))
            if memory > cluster.memory:
                raise SimulationError(
                    f"Session {session.name} needs {memory / 1e9:.1f} GB of a device, "
                    f"which has {cluster.memory / 1e9:.1f}."
                )
        self._widest = widest
        self._scheduler, self._terms = scheduler, terms
        self._show, self._total = show, workload.cells
        self._runs: dict[SessionId, SessionRun] = {}
        self._reasons: dict[SessionId, str] = {}  # why a session waits
        devices = SimulatedDevices(cluster, _classes(workload))
        self._world = SimulatedWorld(cluster, devices, self._notify)
        self._memory = SimulatedMemory(self._world, self._close)
        self._leases = SimulatedLeases(self._world, self._memory, self._finish)
        for each in workload.sessions:
            self._world.at(each.cells[0].think, partial(self._open, each))

    def run(self) -> SimulationOutcome:
        """Run to the end of the last session.

        Raises
        ------
        SimulationError
            The scheduler made an impossible decision, or stopped deciding.
        """
        world, in_vain = self._world, 0
        while len(world.outcome.cells) < self._total:
            tick, due = self._scheduler.next_tick(), world.next_due
            if tick is not None and (due is None or tick < due):
                if tick > world.now and due is not None:
                    in_vain = 0  # time passes, towards an event that will happen
                world.advance(max(tick, world.now))
                self._notify(Tick(world.now))
                in_vain += 1
                if in_vain > TICKS_IN_VAIN_MAX:
                    raise SimulationError(
                        f"Ticks without end at {world.now:.3f} s: {self._waiting_text()}"
                    )
                continue
            if due is None:
                raise SimulationError(f"Nothing is decided any more: {self._waiting_text()}")
            world.step()
            in_vain = 0
        while world.next_due is not None:  # the last session closes
            world.step()
        return world.outcome

    def _waiting_text(self) -> str:
        names = [name for name, run in self._runs.items() if run.waiting and run.started is None]
        why = next((f": {self._reasons[name]}" for name in names if name in self._reasons), "")
        return f"{len(names)} sessions wait ({', '.join(names[:3])}, …){why}"

    def _notify(self, event: Event) -> None:
        for decision in self._scheduler.handle(event):
            self._do(decision)

    def _do(self, decision: Decision) -> None:
        match decision:
            case Grant():
                self._leases.grant(self._run(decision.session), decision)
            case Preempt():
                self._leases.preempt(self._run(decision.session), decision)
            case Evict():
                self._memory.evict(self._run(decision.session), decision)
            case MigrateMemory():
                self._memory.migrate(self._run(decision.session), decision)
            case Pack() | Unpack():
                raise SimulationError(f"No session here may be packed: {decision.reason}")
            case Queued():
                self._reasons[decision.session] = decision.reason
            case GuaranteeChanged() | PrepareResize():
                pass

    # The life of a session.

    def _open(self, session: SimulatedSession) -> None:
        world, terms = self._world, self._terms(session)
        record = SessionRecord(
            session.name, session.gpus, terms.tier, terms.weight, world.now, vc=terms.vc
        )
        record.alone = session.alone - session.cells[0].think
        run = SessionRun(session, record, demand_at_open=world.demand_seconds)
        self._runs[session.name] = run
        world.outcome.sessions.append(record)
        world.notify(
            SessionAdded(
                world.now,
                session.name,
                terms.vc,
                terms.user,
                terms.tier,
                terms.weight,
                self._most(session),
                session.memory,
                gpus_min=session.gpus_min,
                ranks=session.gpus,
            )
        )
        self._submit(run)

    def _most(self, session: SimulatedSession) -> int:
        """Return the devices that a session can use."""
        if session.gpus_min is None:
            return session.gpus
        return sizes(session.gpus, session.gpus_min, self._widest)[-1]

    def _submit(self, run: SessionRun) -> None:
        world = self._world
        run.waiting, run.submitted, run.first_started = True, world.now, None
        run.remaining = run.session.cells[run.index].duration
        world.demand += run.session.gpus
        world.notify(CellSubmitted(world.now, run.session.name))

    def _finish(self, run: SessionRun) -> None:
        world = self._world
        run.remaining, run.waiting = 0.0, False
        assert run.first_started is not None
        cell = run.session.cells[run.index]
        name, gpus = run.session.name, run.session.gpus
        record = CellRecord(name, gpus, cell.duration, run.submitted, run.first_started, world.now)
        world.outcome.cells.append(record)
        world.outcome.finished = world.now
        world.demand -= gpus
        run.record.note_runnable(run.submitted, world.now)
        run.index += 1
        self._show(len(world.outcome.cells), self._total)
        if run.index < len(run.session.cells):
            think = run.session.cells[run.index].think
            world.at(world.now + think, lambda: self._submit(run))
        else:
            world.at(world.now, lambda: self._close(run))
        world.notify(CellFinished(world.now, name))

    def _close(self, run: SessionRun) -> None:
        """Close a finished session; if its memory is being moved, close it after that."""
        if run.index < len(run.session.cells) or run.evicting:
            return
        world = self._world
        run.record.closed = world.now
        lived = world.now - run.record.opened
        if lived > 0:
            run.record.demand = (world.demand_seconds - run.demand_at_open) / lived
        for device in run.resident:
            world.devices.unload(device, run.session.name)
        run.resident.clear()
        world.notify(SessionRemoved(world.now, run.session.name))

    def _run(self, session: SessionId) -> SessionRun:
        if session not in self._runs:
            raise SimulationError(f"There is no session {session}.")
        return self._runs[session]


def _classes(workload: Workload) -> list[tuple[int, float]]:
    """Return the numbers of devices that cells need, each with its share of the cells."""
    counts: dict[int, int] = {}
    for session in workload.sessions:
        counts[session.gpus] = counts.get(session.gpus, 0) + len(session.cells)
    return [(gpus, count / workload.cells) for gpus, count in sorted(counts.items())]
