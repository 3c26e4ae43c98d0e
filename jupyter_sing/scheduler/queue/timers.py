"""Timers: when each session is reviewed next, and what changes with time alone.

Levels sink with service and rise with waiting, quanta end, slack runs out. Every session has at
most one timer: the next moment at which anything about it changes by itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger
from jupyter_sing.scheduler.fairness.limits import Limiter
from jupyter_sing.scheduler.fairness.mlfq import AGING, level_end, level_of, turn_of
from jupyter_sing.scheduler.fairness.tier_targets import threshold
from jupyter_sing.scheduler.queue.preemption import RunningSessions
from jupyter_sing.scheduler.queue.wait_queue import LEVELS, WaitQueue
from jupyter_sing.scheduler.settings import EngineSettings
from jupyter_sing.scheduler.state import EngineSession, Phase

REVIEW_SECONDS_MIN = 0.5
"""Minimum seconds between two reviews of the same waiting session."""


class Timers:
    """Timers, and the sessions that wait and execute, whose order depends on time.

    Attributes
    ----------
    turns
        Users and virtual clusters at a device limit of which a session has changed: one of their
        sessions may replace another one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        ledger: ServiceLedger,
        below: Callable[[str, int], bool],
        stop: Callable[[EngineSession, float], None],
    ) -> None:
        self.settings = settings
        self.limiter = Limiter(settings, self.request_tick)
        self.waiting = WaitQueue(
            ledger, settings.throttle, settings.burst, below, self.limiter.is_capped
        )
        self.running = RunningSessions(settings, self.waiting.is_throttled)
        self.turns: dict[Flow, None] = {}
        self._stop = stop
        # (time, order, session, its `timers` at that time); None: a tick only.
        self._timers: list[tuple[float, int, EngineSession | None, int]] = []
        self._order = 0

    def configure(self, settings: EngineSettings) -> None:
        """Use other settings from now on."""
        self.settings = self.running.settings = settings
        self.waiting.throttle, self.waiting.burst = settings.throttle, settings.burst
        self.limiter.configure(settings)

    def next(self) -> float | None:
        """Return the time of the next timer that is still valid."""
        while self._timers:
            at, _, session, version = self._timers[0]
            if session is None or session.timers == version:
                return at
            heapq.heappop(self._timers)
        return None

    def quantum_of(self, session: EngineSession, now: float) -> float:
        """Return the quantum, in seconds, of a lease that begins now."""
        level = level_of(session.attained_at(now), self.settings)
        stretch = max((device.budget.stretch(now) for device in session.lease.devices), default=1.0)
        return turn_of(level, session.lease.switch, self.settings) * stretch

    def level(self, session: EngineSession, now: float) -> int:
        """Return the level at which a session waits or executes, including its rise by waiting."""
        return max(0, level_of(session.attained_at(now), self.settings) - session.wait.boost)

    def is_urgent(self, session: EngineSession, now: float) -> bool:
        """True if a waiting session goes before those without a tier target."""
        if session.wait.boost > level_of(session.attained, self.settings):
            return True  # it has waited long enough, regardless of the targets of others
        return self.running.is_urgent(session, self.level(session, now), now)

    def set_timer(self, session: EngineSession, at: float | None) -> None:
        """Set the time of the next review of a session, replacing an earlier one."""
        session.timers += 1
        if at is not None:
            self._order += 1
            heapq.heappush(self._timers, (at, self._order, session, session.timers))

    def request_tick(self, at: float) -> None:
        """Request a tick at that time."""
        self._order += 1
        heapq.heappush(self._timers, (at, self._order, None, 0))

    def due(self, now: float) -> None:
        """Review every session whose timer is due."""
        while self._timers and self._timers[0][0] <= now:
            _, _, session, version = heapq.heappop(self._timers)
            if session is not None and session.timers == version:
                self.review(session, now)
        for session in self.limiter.due(now):
            self.review(session, now)

    def mark_flows(self, session: EngineSession) -> None:
        """Record that a session might replace another one of its user, or be replaced."""
        for quota in session.quotas:
            if quota.limits.devices < math.inf:
                self.turns[quota.flow] = None

    def review(self, session: EngineSession, now: float) -> None:
        """Bring level, urgency and place in the order up to date, and set the next timer."""
        self.mark_flows(session)
        if session.phase is Phase.WAITING:
            boost = session.wait.boost
            while boost < LEVELS and now >= self._rises_at(session, boost):
                boost += 1
            rises, session.wait.boost = boost != session.wait.boost, boost
            urgent = self.is_urgent(session, now)
            if rises or urgent != session.wait.urgent:
                session.wait.urgent = urgent
                if session in self.waiting:
                    self.waiting.remove(session)
                    self.waiting.add(session, self.level(session, now), now)
            self.set_timer(session, self.next_review(session, now))
        elif session.phase is Phase.RUNNING:
            level = level_of(session.attained_at(now), self.settings)
            if level != session.lease.level:
                session.lease.level = level
                session.lease.quantum_end = now + self.quantum_of(session, now)
            if now >= session.lease.quantum_end and self.limiter.has_ended(session, now):
                self._stop(session, now)
                return
            exposed = min(session.lease.protected_until, session.lease.exposed_at)
            if now >= exposed or session.gang is not None:  # a gang may have to shrink at any time
                self.running.put(session, now)
            self.set_timer(session, self._next_change(session, now))

    def _rises_at(self, session: EngineSession, boost: int) -> float:
        """Return when a waiting session rises for the next time."""
        quantum = self.settings.quanta[level_of(session.attained, self.settings)]
        return session.wait.since + (boost + 1) * AGING * quantum

    def next_review(self, session: EngineSession, now: float) -> float | None:
        """Return when a waiting session rises a level or becomes urgent."""
        times = []
        if session.wait.boost <= level_of(session.attained, self.settings):
            times.append(self._rises_at(session, session.wait.boost))
        goal = session.terms.goal
        if goal > 0.0 and not session.wait.urgent:
            quantum = self.settings.quanta[self.level(session, now)]
            spare = session.account.slack(goal) - threshold(session.lease.switch, quantum)
            # Its own demand grows while it waits, so that of each second only the target is lost.
            times.append(now + max(REVIEW_SECONDS_MIN, spare / goal))
        return min(times, default=None)

    def _next_change(self, session: EngineSession, now: float) -> float | None:
        """Return when an executing session may be stopped, sinks, or ends its quantum."""
        hold = self.running.hold_end(session)
        marks = (
            session.lease.exposed_at,
            session.lease.protected_until,
            session.lease.quantum_end,
            hold,
        )
        times = [mark for mark in marks if now < mark < math.inf]
        sinks = level_end(session.attained_at(now), self.settings)
        if sinks is not None:
            times.append(now + max(1e-6, sinks))
        return min(times, default=None)
