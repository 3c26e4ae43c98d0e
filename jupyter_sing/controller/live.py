"""Tells the engine what happens, and has the agent do what the engine decides."""

from __future__ import annotations

import asyncio
import logging
import pwd
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from jupyter_sing.controller.journal import Entry, Journal
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import (
    Decision,
    Evict,
    Grant,
    Migrate,
    Pack,
    Preempt,
    Queued,
    Unpack,
)
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.settings import Device, Settings
from kernelproxy import paths
from kernelproxy.agent.arbiter import Hands, Terms

log = logging.getLogger(__name__)

#: What a switch costs until it was measured: bytes per second, and seconds.
COPY_RATE, SWITCH_SECONDS = 2e9, 0.05

#: Sessions that fit onto a device together change places in milliseconds, so turns are short.
LIVE = Settings(quanta=(2.0, 4.0, 8.0, 16.0))

_ID = re.compile(r"\b[0-9a-f]{12}\b")


class Controller:
    """An `kernelproxy.agent.arbiter.Arbiter` that asks the engine.

    Parameters
    ----------
    settings : Settings, optional
        Of the engine.
    clock : callable, optional
        Seconds; the monotonic clock by default.
    directory : Path, optional
        Where decisions are written down; by default in the runtime directory.
    """

    keeps = False

    def __init__(
        self,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
    ) -> None:
        self._settings, self._clock = settings or LIVE, clock
        self._journal = Journal(directory or paths.runtime_dir())
        self._names: dict[str, str] = {}
        self._told: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, hands: Hands, devices: dict[str, int]) -> None:
        """See `Arbiter`."""
        self._hands = hands
        found = [
            Device(name, memory, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS)
            for name, memory in devices.items()
        ]
        self._engine = Engine(found, self._settings)

    # ---------------------------------------------------------------- what the agent says

    def opened(self, terms: Terms) -> None:
        """See `Arbiter`."""
        self._names[terms.session] = terms.name
        self._tell(
            events.SessionOpened(
                self._clock(), terms.session, "default", _user_name(terms.owner),
                memory=terms.memory, device=terms.device,
                bound=terms.device if terms.bound else None,
            )
        )  # fmt: skip

    def closed(self, session: str) -> None:
        """See `Arbiter`."""
        self._tell(events.SessionClosed(self._clock(), session))
        self._names.pop(session, None)

    def wants(self, session: str) -> None:
        """See `Arbiter`."""
        self._tell(events.CellSubmitted(self._clock(), session))

    def done(self, session: str) -> None:
        """See `Arbiter`."""
        self._tell(events.CellFinished(self._clock(), session))

    def started(self, session: str, token: int) -> None:
        """See `Arbiter`."""
        self._tell(events.Started(self._clock(), session, token))

    def released(self, session: str, token: int) -> None:
        """See `Arbiter`."""
        self._tell(events.Released(self._clock(), session, token))

    def lost(self, session: str) -> None:
        """See `Arbiter`."""
        # It may have had nothing to do, and then wants its lease to be restored.
        self._tell(events.WorkerDied(self._clock(), session))
        self._tell(events.CellSubmitted(self._clock(), session))

    def moved(self, session: str, device: str) -> None:
        """See `Arbiter`."""
        self._tell(events.Moved(self._clock(), session, device))

    def evicted(self, session: str, device: str) -> None:
        """See `Arbiter`."""
        self._tell(events.Evicted(self._clock(), session, device))

    def failed(self, session: str, device: str, decision: str, token: int, why: str) -> None:
        """See `Arbiter`."""
        log.warning("Session %s: %s: %s", session, decision, why)
        self._tell(events.Failed(self._clock(), session, device, decision, token, why))

    def measured(self, session: str, memory: int, seconds: float) -> None:
        """See `Arbiter`."""
        self._tell(events.Measured(self._clock(), session, memory, seconds))

    def contended(self, session: str) -> bool:
        """See `Arbiter`."""
        return self._engine.contended(session)

    async def close(self) -> None:
        """See `Arbiter`."""
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._journal.close)

    # ---------------------------------------------------------------- what the engine decides

    def _tell(self, event: events.Event) -> None:
        """Give an event to the engine, after those that are being handled."""
        self._told.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._told:
                for decision in self._engine.handle(self._told.popleft()):
                    self._carry_out(decision)
        finally:
            self._busy = False
        self._set_timer()

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Pack | Unpack):
            return
        why = self._named(decision.reason)
        match decision:
            case Grant(session, devices, token, quantum):
                why = f"It may use {devices[0]} for {quantum:g} s: {why}."
                self._hands.grant(session, devices[0], token)
            case Preempt(session, token):
                why = f"Its turn ends: {why}."
                self._hands.preempt(session, token)
            case Evict(session, device, to):
                why = f"Its memory goes from {device} to {to}: {why}."
                self._hands.evict(session, why.rstrip("."))
            case Migrate(session, source, target):
                why = f"It moves from {source} to {target}: {why}."
                self._hands.migrate(session, target)
            case Queued(session, position, wait):
                why = f"Waits for its turn (place {position}, about {wait:.0f} s): {why}."
                self._hands.explain(session, why)
        name = self._names.get(session, session)
        kind = type(decision).__name__.lower()
        self._journal.note(Entry(time.time(), session, name, kind, why))

    def _named(self, reason: str) -> str:
        """Put names for ids, and no full stop at the end."""
        text = _ID.sub(lambda found: self._names.get(found[0], found[0]), reason)
        return text.rstrip(". ")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._engine.next_tick()
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - self._clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._tell(events.Tick(self._clock()))


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
