"""Controller double in virtual time: carries out the engine's decisions and checks each of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jupyter_sing.scheduler import events
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
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.gangs.ranks import per_device
from jupyter_sing.scheduler.settings import DeviceSpec


@dataclass
class ControllerNotebook:
    """Actual state of a session: where it is, and the remaining work of its cell.

    Ranks of a gang that share a device execute by turns: its work takes so many times as long.
    """

    memory: int
    ranks: int = 0
    left: float = 0.0
    submitted: float = 0.0
    first: float | None = None
    token: int = 0
    devices: tuple[str, ...] = ()
    since: float | None = None
    homes: set[str] = field(default_factory=set)
    had: float = 0.0
    generation: int = 0

    @property
    def slowness(self) -> int:
        """Ranks on the fullest of its devices."""
        return per_device(self.ranks, len(self.devices)) if self.ranks and self.devices else 1

    @property
    def size(self) -> int:
        """Bytes that it has on each of its devices."""
        return self.memory * self.slowness


class FakeController:
    """Answers as a controller would, after `delay` seconds, and moves memory at device speed."""

    def __init__(self, engine: Engine, devices: Sequence[DeviceSpec], delay: float = 0.0) -> None:
        self.engine = engine
        self.devices = {device.id: device for device in devices}
        self.delay = delay
        self.now = 0.0
        self.notebooks: dict[str, ControllerNotebook] = {}
        self.holders: dict[str, list[str]] = {device.id: [] for device in devices}
        self.packs: dict[str, tuple[str, ...]] = {}
        self.resident: dict[str, dict[str, int]] = {device.id: {} for device in devices}
        self.log: list[tuple[float, Event]] = []
        self.decided: list[tuple[float, Decision]] = []
        self.waits: list[tuple[str, float]] = []
        self.token = 0
        self.finished: Callable[[str], None] = lambda session: None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    # What tests call.

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, action))

    def tell(self, event: Event) -> list[Decision]:
        self.log.append((self.now, event))
        decisions = self.engine.handle(event)
        for decision in decisions:
            self.decided.append((self.now, decision))
            self._carry_out(decision)
        return decisions

    def open(self, session: str, memory: int = 0, **terms: object) -> None:
        gang = "gpus_min" in terms
        ranks = int(str(terms.get("ranks", terms.get("gpus")))) if gang else 0
        self.notebooks[session] = ControllerNotebook(memory, ranks)
        if isinstance(home := terms.get("device"), str):
            self._put(session, home)
        given: dict[str, object] = {"vc": "default", "user": session, **terms}
        self.tell(events.SessionAdded(self.now, session, memory=memory, **given))  # type: ignore[arg-type]

    def submit(self, session: str, seconds: float) -> None:
        notebook = self.notebooks[session]
        notebook.left = seconds
        notebook.submitted = self.now
        notebook.first = None
        self.tell(events.CellSubmitted(self.now, session))

    def run_until(self, end: float) -> None:
        while True:
            tick = self.engine.next_tick()
            queued = self._queue[0][0] if self._queue else None
            if queued is not None and queued <= end and (tick is None or queued <= tick):
                self.now, _, action = heapq.heappop(self._queue)
                action()
            elif tick is not None and tick <= end:
                self.now = max(self.now, tick)
                self.tell(events.Tick(self.now))
            else:
                self.now = end
                return

    def fail(self, device: str) -> None:
        """Let a device fail: what is there is lost, and what executes there stops.

        A gang stops only when it is preempted, and a session that has a lease elsewhere continues.
        """
        for session in sorted({*self.resident[device], *self.holders[device]}):
            held = self.notebooks[session].devices
            if self.notebooks[session].ranks or (held and device not in held):
                self._drop(session, device)
            else:
                self.lose(session)
        self.tell(events.DeviceFailed(self.now, device))

    def lose(self, session: str) -> None:
        """End a session's worker, and free its memory."""
        if self.notebooks[session].devices:
            self.halt(session)
        for device in sorted(self.notebooks[session].homes):
            self._drop(session, device)

    def restart(self, engine: Engine) -> None:
        """End all workers and drop pending decisions; continue with another engine."""
        for session in sorted(self.notebooks):
            self.lose(session)
        self._queue.clear()
        self.engine = engine

    def executing(self, device: str) -> list[str]:
        return [s for s in self.holders[device] if self.notebooks[s].since is not None]

    def served(self, session: str) -> float:
        """Return the seconds that a session has executed."""
        notebook = self.notebooks[session]
        return notebook.had + (self.now - notebook.since if notebook.since is not None else 0.0)

    # Execution of decisions.

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Grant):
            self._grant(decision)
        elif isinstance(decision, Preempt):
            notebook = self.notebooks[decision.session]
            assert notebook.token == decision.token, "a stale lease was preempted"
            self.later(self.delay, lambda: self._release(decision.session, decision.token))
        elif isinstance(decision, Evict):
            self._leave(decision.session, decision.device)
        elif isinstance(decision, MigrateMemory):
            self._migrate(decision)
        elif isinstance(decision, Pack):
            self.packs[decision.device] = decision.sessions
        elif isinstance(decision, Unpack):
            del self.packs[decision.device]
        else:
            assert isinstance(decision, Queued | GuaranteeChanged | PrepareResize)

    def _grant(self, grant: Grant) -> None:
        notebook = self.notebooks[grant.session]
        assert grant.token > self.token, "tokens increase"
        assert not notebook.devices, "a session has one lease"
        self.token = notebook.token = grant.token
        notebook.devices = grant.devices
        seconds = self.delay
        for device in grant.devices:
            holders = self.holders[device]
            holders.append(grant.session)
            assert len(holders) == 1 or sorted(holders) == sorted(self.packs[device])
            here = self.resident[device].get(grant.session)
            if here is None or (here < notebook.size and notebook.ranks):
                known, more = self.devices[device], notebook.size - (here or 0)
                seconds = max(seconds, known.constant_seconds + more / known.bytes_per_second)
            self._put(grant.session, device)
        token = grant.token
        self.later(seconds, lambda: self._start(grant.session, token))

    def _put(self, session: str, device: str) -> None:
        notebook = self.notebooks[session]
        notebook.homes.add(device)
        resident = self.resident[device]
        resident[session] = notebook.size
        assert sum(resident.values()) <= self.devices[device].memory, "a device is overfull"

    def _drop(self, session: str, device: str) -> None:
        self.notebooks[session].homes.discard(device)
        self.resident[device].pop(session, None)

    def _start(self, session: str, token: int) -> None:
        notebook = self.notebooks.get(session)
        if notebook is None or notebook.token != token or not notebook.devices:
            return
        self._leave_former(notebook, session)
        notebook.since = self.now
        if notebook.first is None:
            notebook.first = self.now
            self.waits.append((session, self.now - notebook.submitted))
        notebook.generation += 1
        generation = notebook.generation
        seconds = notebook.left * notebook.slowness
        self.later(seconds, lambda: self._finish(session, generation))
        self.tell(events.Started(self.now, session, token))

    def _leave_former(self, notebook: ControllerNotebook, session: str) -> None:
        for home in sorted(notebook.homes - set(notebook.devices)):
            self._drop(session, home)

    def halt(self, session: str) -> None:
        notebook = self.notebooks[session]
        if notebook.since is None and notebook.devices:  # loading completes in the background
            self._leave_former(notebook, session)
        if notebook.since is not None:
            done = (self.now - notebook.since) / notebook.slowness
            notebook.left = max(0.0, notebook.left - done)
            notebook.had += self.now - notebook.since
        notebook.since = None
        notebook.generation += 1
        for device in notebook.devices:
            self.holders[device].remove(session)
        notebook.devices = ()

    def _finish(self, session: str, generation: int) -> None:
        notebook = self.notebooks.get(session)
        if notebook is None or notebook.generation != generation or notebook.since is None:
            return
        self.halt(session)
        self.tell(events.CellFinished(self.now, session))
        self.finished(session)

    def _release(self, session: str, token: int) -> None:
        notebook = self.notebooks.get(session)
        if notebook is None or notebook.token != token or not notebook.devices:
            return
        self.halt(session)
        self.tell(events.Released(self.now, session, token))

    def _leave(self, session: str, device: str) -> None:
        notebook = self.notebooks[session]
        assert device in notebook.homes, "what is not there cannot be evicted"
        assert not notebook.devices, "who executes is not evicted"
        size = self.resident[device][session]
        seconds = size / self.devices[device].bytes_per_second
        self.later(seconds, lambda: self._left(session, device))

    def _left(self, session: str, device: str) -> None:
        if session in self.notebooks and device in self.notebooks[session].homes:
            self._drop(session, device)
            self.tell(events.Evicted(self.now, session, device))

    def _migrate(self, move: MigrateMemory) -> None:
        notebook = self.notebooks[move.session]
        assert move.source in notebook.homes
        assert not notebook.devices, "who executes is not migrated"
        self._put(move.session, move.target)
        known = self.devices[move.target]
        seconds = known.constant_seconds + notebook.memory / known.bytes_per_second
        self.later(seconds, lambda: self._moved(move))

    def _moved(self, move: MigrateMemory) -> None:
        if move.session in self.notebooks and move.target in self.notebooks[move.session].homes:
            self._drop(move.session, move.source)
            self.tell(events.Moved(self.now, move.session, move.target))
