"""Simulation of a workload under a scheduler in virtual time.

The scheduler is any object with the engine's interface: events go in, decisions come out, and the
simulation carries them out. It is strict: a decision that is impossible on real devices is a
`SimulationError`, for every scheduler.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    Queued,
    Unpack,
)
from jupyter_sing.scheduler.events import (
    CellFinished,
    CellSubmitted,
    Event,
    Evicted,
    Moved,
    Released,
    SessionAdded,
    SessionRemoved,
    Started,
    Tick,
)
from jupyter_sing.scheduler.ids import DeviceId, SessionId
from jupyter_sing.scheduler.settings import Tier
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulatedDevices, SimulationError
from jupyter_sing.simulator.outcome import CellRecord, SessionRecord, SimulationOutcome
from jupyter_sing.simulator.workload import SimulatedSession, Workload

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


@dataclass
class _Run:
    """State of a session on its way through its cells."""

    session: SimulatedSession
    terms: SimulatedTerms
    record: SessionRecord
    index: int = 0
    waiting: bool = False  # has a cell that is not finished
    remaining: float = 0.0
    submitted: float = 0.0
    first_started: float | None = None
    token: int | None = None  # of the lease that it has
    devices: tuple[DeviceId, ...] = ()
    granted: float = 0.0
    started: float | None = None  # when it began to execute under that lease
    stopping: bool = False
    leaving: tuple[DeviceId, ...] = ()  # where its memory is free once it has started
    resident: dict[DeviceId, float] = field(default_factory=dict)  # since when it is not executing
    evicting: set[DeviceId] = field(default_factory=set)
    loaded: bool = False  # was on a device before
    cold: bool = False  # its memory is on disk
    demand_at_open: float = 0.0


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
            if session.gpus > cluster.gpus:
                raise SimulationError(
                    f"Session {session.name} needs {session.gpus} devices of {cluster.gpus}."
                )
            if session.gpus > widest:
                raise SimulationError(
                    f"Session {session.name} needs {session.gpus} devices at once, and a host has "
                    f"{widest} at most."
                )
            if session.memory > cluster.memory:
                raise SimulationError(
                    f"Session {session.name} needs {session.memory / 1e9:.1f} GB of a device, "
                    f"which has {cluster.memory / 1e9:.1f}."
                )
        self._workload, self._cluster, self._scheduler = workload, cluster, scheduler
        self._terms, self._show, self._total = terms, show, workload.cells
        self._devices = SimulatedDevices(cluster, _classes(workload))
        self._runs: dict[SessionId, _Run] = {}
        self._said: dict[SessionId, str] = {}  # why a session waits
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._now = 0.0
        self._token = 0
        self._demand, self._demand_seconds = 0, 0.0
        self._outcome = SimulationOutcome(cluster.gpus)
        for each in workload.sessions:
            self._at(each.cells[0].think, partial(self._open, each))

    def run(self) -> SimulationOutcome:
        """Run to the end of the last session.

        Raises
        ------
        SimulationError
            The scheduler made an impossible decision, or stopped deciding.
        """
        in_vain = 0
        while len(self._outcome.cells) < self._total:
            tick = self._scheduler.next_tick()
            if tick is not None and (not self._heap or tick < self._heap[0][0]):
                if tick > self._now and self._heap:
                    in_vain = 0  # time passes, towards an event that will happen
                self._advance(max(tick, self._now))
                self._tell(Tick(self._now))
                in_vain += 1
                if in_vain > TICKS_IN_VAIN_MAX:
                    raise SimulationError(
                        f"Ticks without end at {self._now:.3f} s: {self._waiting_text()}"
                    )
                continue
            if not self._heap:
                raise SimulationError(f"Nothing is decided any more: {self._waiting_text()}")
            at, _, do = heapq.heappop(self._heap)
            self._advance(at)
            do()
            in_vain = 0
        while self._heap:  # the last session closes
            at, _, do = heapq.heappop(self._heap)
            self._advance(at)
            do()
        return self._outcome

    def _waiting_text(self) -> str:
        names = [name for name, run in self._runs.items() if run.waiting and run.started is None]
        why = next((f": {self._said[name]}" for name in names if name in self._said), "")
        return f"{len(names)} sessions wait ({', '.join(names[:3])}, …){why}"

    def _at(self, at: float, do: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, do))

    def _advance(self, at: float) -> None:
        passed = at - self._now
        if passed > 0:
            self._demand_seconds += passed * self._demand
            self._outcome.fragmented += passed * self._devices.fragmented
            self._now = at

    def _tell(self, event: Event) -> None:
        for decision in self._scheduler.handle(event):
            self._do(decision)

    def _do(self, decision: Decision) -> None:
        match decision:
            case Grant():
                self._grant(decision)
            case Preempt():
                self._preempt(decision)
            case Evict():
                self._evict(decision)
            case MigrateMemory():
                self._migrate(decision)
            case Pack() | Unpack():
                raise SimulationError(f"No session here may be packed: {decision.reason}")
            case Queued():
                self._said[decision.session] = decision.reason
            case GuaranteeChanged():
                pass

    # The life of a session.

    def _open(self, session: SimulatedSession) -> None:
        terms = self._terms(session)
        record = SessionRecord(
            session.name, session.gpus, terms.tier, terms.weight, self._now, vc=terms.vc
        )
        record.alone = session.alone - session.cells[0].think
        run = _Run(session, terms, record, demand_at_open=self._demand_seconds)
        self._runs[session.name] = run
        self._outcome.sessions.append(record)
        self._tell(
            SessionAdded(
                self._now,
                session.name,
                terms.vc,
                terms.user,
                terms.tier,
                terms.weight,
                session.gpus,
                session.memory,
            )
        )
        self._submit(run)

    def _submit(self, run: _Run) -> None:
        run.waiting, run.submitted, run.first_started = True, self._now, None
        run.remaining = run.session.cells[run.index].duration
        self._demand += run.session.gpus
        self._tell(CellSubmitted(self._now, run.session.name))

    def _finish(self, run: _Run, token: int) -> None:
        if run.token != token or run.started is None:
            return  # it was preempted before
        self._stop(run)
        run.remaining, run.waiting = 0.0, False
        assert run.first_started is not None
        cell = run.session.cells[run.index]
        name, gpus = run.session.name, run.session.gpus
        record = CellRecord(name, gpus, cell.duration, run.submitted, run.first_started, self._now)
        self._outcome.cells.append(record)
        self._outcome.finished = self._now
        self._demand -= gpus
        run.record.note_runnable(run.submitted, self._now)
        run.index += 1
        self._show(len(self._outcome.cells), self._total)
        if run.index < len(run.session.cells):
            think = run.session.cells[run.index].think
            self._at(self._now + think, lambda: self._submit(run))
        else:
            self._at(self._now, lambda: self._close(run))
        self._tell(CellFinished(self._now, name))

    def _close(self, run: _Run) -> None:
        """Close a finished session; if its memory is being moved, close it after that."""
        if run.index < len(run.session.cells) or run.evicting:
            return
        run.record.closed = self._now
        lived = self._now - run.record.opened
        if lived > 0:
            run.record.demand = (self._demand_seconds - run.demand_at_open) / lived
        for device in run.resident:
            self._devices.unload(device, run.session.name)
        run.resident.clear()
        self._tell(SessionRemoved(self._now, run.session.name))

    # Leases.

    def _grant(self, grant: Grant) -> None:
        run = self._run(grant.session)
        if grant.token <= self._token:
            raise SimulationError(f"Token {grant.token} of {grant.session} is not new.")
        self._token = grant.token
        if not run.waiting or run.token is not None or run.evicting:
            raise SimulationError(f"{grant.session} was granted devices that it cannot use now.")
        if len(set(grant.devices)) != run.session.gpus:
            raise SimulationError(f"{grant.session} was granted {len(grant.devices)} devices.")
        for device in grant.devices:
            self._devices.take(device, grant.session, grant.token)
        run.token, run.devices, run.granted = grant.token, grant.devices, self._now
        ready = self._load(run)
        self._at(ready, lambda: self._start(run, grant.token))

    def _load(self, run: _Run) -> float:
        """Begin to load a session onto its devices; return when it is loaded."""
        missing = [device for device in run.devices if device not in run.resident]
        run.leaving = tuple(device for device in run.resident if device not in run.devices)
        if not missing:
            return self._now
        size, cluster = run.session.memory, self._cluster
        seconds = cluster.switch + size / cluster.bandwidth
        if run.cold:
            seconds = cluster.switch + size / min(cluster.bandwidth, cluster.disk_bandwidth)
        ready = self._now
        for device in run.leaving:  # it moves: what is only there is copied to the host first
            ready = self._devices.transfer(device, self._now, self._dirty_seconds(run, device))
        for device in missing:
            self._devices.load(device, run.session.name, size)
            run.resident[device] = self._now
        ready = max(self._devices.transfer(device, ready, seconds) for device in missing)
        self._outcome.moved += size * len(missing)
        self._outcome.swaps += run.loaded
        run.loaded, run.cold = True, False
        return ready

    def _start(self, run: _Run, token: int) -> None:
        if run.token != token or run.stopping:
            return  # it was preempted before
        for device in run.leaving:
            self._devices.unload(device, run.session.name)
            del run.resident[device]
        run.leaving = ()
        run.started = self._now
        self._outcome.switching += (self._now - run.granted) * run.session.gpus
        if run.first_started is None:
            run.first_started = self._now
        self._at(self._now + run.remaining, lambda: self._finish(run, token))
        self._tell(Started(self._now, run.session.name, token))

    def _preempt(self, preempt: Preempt) -> None:
        run = self._run(preempt.session)
        if run.token != preempt.token or run.stopping:
            return
        run.stopping = True
        self._outcome.preemptions += 1
        self._at(self._now + self._cluster.suspend, lambda: self._release(run, preempt.token))

    def _release(self, run: _Run, token: int) -> None:
        if run.token != token:
            return  # its cell finished before
        if run.started is None:  # it was still being loaded, which completes in the background
            self._outcome.switching += (self._now - run.granted) * run.session.gpus
            for device in run.leaving:
                self._devices.unload(device, run.session.name)
                del run.resident[device]
            run.leaving = ()
        self._stop(run)
        self._tell(Released(self._now, run.session.name, token))

    def _stop(self, run: _Run) -> None:
        """End a lease."""
        name, gpus = run.session.name, run.session.gpus
        if run.started is not None:
            executed = self._now - run.started
            run.remaining -= executed
            run.record.executed += executed
            run.record.note_executed(run.started, self._now)
            self._outcome.executed += executed * gpus
        self._outcome.charged += (self._now - run.granted) * gpus
        for device in run.devices:
            self._devices.give(device, name)
            run.resident[device] = self._now
        run.token, run.devices, run.started, run.stopping = None, (), None, False

    # Memory.

    def _dirty_seconds(self, run: _Run, device: DeviceId) -> float:
        """Return the seconds to copy to the host what is only on the device."""
        seconds = run.session.memory / self._cluster.bandwidth
        if self._cluster.copy_behind:
            seconds = max(0.0, seconds - (self._now - run.resident[device]))
        self._outcome.moved += int(seconds * self._cluster.bandwidth)
        return seconds

    def _evict(self, evict: Evict) -> None:
        run = self._run(evict.session)
        settled = evict.device in run.resident and evict.device not in run.evicting
        if run.token is not None or not settled:
            raise SimulationError(f"{evict.session} cannot be evicted from {evict.device} now.")
        seconds = self._dirty_seconds(run, evict.device)
        run.evicting.add(evict.device)
        run.cold = evict.to == "disk"
        done = self._devices.transfer(evict.device, self._now, seconds)
        self._at(done, lambda: self._evicted(run, evict.device))

    def _evicted(self, run: _Run, device: DeviceId) -> None:
        run.evicting.discard(device)
        self._devices.unload(device, run.session.name)
        del run.resident[device]
        self._tell(Evicted(self._now, run.session.name, device))
        self._close(run)

    def _migrate(self, move: MigrateMemory) -> None:
        run = self._run(move.session)
        if run.token is not None or move.source not in run.resident or run.evicting:
            raise SimulationError(f"{move.session} cannot be moved from {move.source} now.")
        self._devices.load(move.target, move.session, run.session.memory)
        seconds = self._dirty_seconds(run, move.source)
        run.evicting.add(move.source)
        self._outcome.swaps += 1
        self._outcome.moved += run.session.memory
        out = self._devices.transfer(move.source, self._now, seconds)
        loading = self._cluster.switch + run.session.memory / self._cluster.bandwidth
        done = self._devices.transfer(move.target, out, loading)
        self._at(done, lambda: self._moved(run, move))

    def _moved(self, run: _Run, move: MigrateMemory) -> None:
        run.evicting.discard(move.source)
        self._devices.unload(move.source, move.session)
        del run.resident[move.source]
        run.resident[move.target] = self._now
        self._tell(Moved(self._now, move.session, move.target))
        self._close(run)

    def _run(self, session: SessionId) -> _Run:
        if session not in self._runs:
            raise SimulationError(f"There is no session {session}.")
        return self._runs[session]


def _classes(workload: Workload) -> list[tuple[int, float]]:
    """Return the numbers of devices that cells need, each with its share of the cells."""
    counts: dict[int, int] = {}
    for session in workload.sessions:
        counts[session.gpus] = counts.get(session.gpus, 0) + len(session.cells)
    return [(gpus, count / workload.cells) for gpus, count in sorted(counts.items())]
