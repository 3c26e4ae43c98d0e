"""Driver of the engine: sends events in their order, and ticks in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Decision
from jupyter_sing.scheduler.engine import Engine

#: Rounds of the event loop in which all sessions that an agent has recovered request devices.
GATHER_ROUNDS = 100


class EngineDriver:
    """Queue of events, and timer, of an engine.

    Parameters
    ----------
    engine : Engine
    clock : callable
        Seconds.
    carry_out : callable
        Called with the decisions about one event, or about several that belong together.
    idle : callable
        Called when there is no event left.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        carry_out: Callable[[list[Decision]], None],
        idle: Callable[[], None],
    ) -> None:
        self._engine, self._clock = engine, clock
        self._carry_out, self._idle = carry_out, idle
        self._queue: deque[events.Event] = deque()
        self._busy = False
        self._gathering = False
        self._timer: asyncio.TimerHandle | None = None

    def gather(self) -> None:
        """Begin to collect the events of recovered sessions; no effect if that has begun."""
        if not self._gathering:
            self._gathering = True
            self._gather(GATHER_ROUNDS)

    def _gather(self, rounds: int) -> None:
        """Send no event to the engine until all recovered sessions have requested devices again.

        They do so within a few rounds of the event loop. Otherwise the first one would be served,
        instead of the one that is owed the most. They are sorted by the service that they have had,
        see `Engine.tags`.
        """
        if rounds:
            asyncio.get_running_loop().call_soon(self._gather, rounds - 1)
            return
        last = {getattr(each, "session", ""): each for each in self._queue}
        submissions = [e for e in last.values() if isinstance(e, events.CellSubmitted)]
        gathered = [each for each in self._queue if each not in submissions]
        self._gathering, now = False, self._clock()
        self._queue.clear()
        self._handle(*gathered)
        submissions.sort(key=lambda each: self._engine.tags(each.session, now))
        if submissions:
            self._handle(*(replace(each, at=now) for each in submissions))

    def send(self, event: events.Event) -> None:
        """Queue an event for the engine; handle it now unless another one is being handled."""
        self._queue.append(event)
        if not self._busy and not self._gathering:
            self._handle(self._queue.popleft())

    def _handle(self, *arrived: events.Event) -> None:
        """Let the engine decide and carry that out; repeat for events queued meanwhile."""
        self._busy = True
        try:
            while arrived:
                decisions = self._engine.handle(*arrived)
                self._carry_out(decisions)
                arrived = (self._queue.popleft(),) if self._queue else ()
        finally:
            self._busy = False
        self._set_timer()
        self._idle()

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
        self.send(events.Tick(self._clock()))

    def close(self) -> None:
        """Send no more ticks."""
        if self._timer is not None:
            self._timer.cancel()
