"""Executing sessions that could be preempted, in the order in which they become victims.

The order, first victim first: what was borrowed beyond guarantees; Basic, then Standard, then
Premium, those with most surplus first; highest level; least to move. Those whose minimum run time
is not over come last: only basic ones stop, and only for premium sessions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from jupyter_sing.scheduler.fairness.tier_targets import threshold
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE, LEVELS
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from jupyter_sing.scheduler.state import EngineSession, Phase, SessionQuota

ORDER = {Tier.BASIC: 0, Tier.STANDARD: 1, Tier.PREMIUM: 2}
PROBES = 8
"""Victims per tier and level that are examined more closely."""

Entry: TypeAlias = tuple[int, float, int, int, int, EngineSession]
Pool: TypeAlias = list[list[Entry]]


def misses(session: EngineSession, quantum: float, now: float) -> bool:
    """True if a session misses its tier target unless it executes soon, or continues to execute."""
    if session.terms.goal == 0.0:
        return False
    session.account.settle(now)
    return session.account.slack(session.terms.goal) < threshold(session.lease.switch, quantum)


def behind(one: EngineSession, other: EngineSession, now: float) -> float:
    """Return the weighted service in seconds by which `one` is behind `other`; negative: ahead.

    The two flows are compared below their common parent.
    """
    mine, theirs = one.flow, other.flow
    while mine.parent is not theirs.parent:
        assert mine.parent
        assert theirs.parent
        mine, theirs = mine.parent, theirs.parent
    return theirs.at(now) - mine.at(now)


class RunningSessions:
    """Sessions that execute.

    Attributes
    ----------
    settings
        Those of the engine.
    """

    def __init__(
        self,
        settings: EngineSettings,
        is_throttled: Callable[[EngineSession, int, float], bool],
    ) -> None:
        self.settings = settings
        self._is_throttled = is_throttled
        # By virtual cluster, "" for what no guarantee protects: a heap per tier and level.
        self._pools: dict[str, Pool] = {}
        # The same for each user or virtual cluster with a device limit.
        self._limited: dict[SessionQuota, Pool] = {}
        self._here: dict[EngineSession, None] = {}
        self._gangs: dict[EngineSession, None] = {}  # those of them that are gangs

    def __len__(self) -> int:
        return len(self._here)

    def has_own(self, vc: str) -> bool:
        """True if sessions execute, or did, within the guarantee of a virtual cluster."""
        return vc in self._pools

    def put(self, session: EngineSession, now: float) -> None:
        """Add a session, or bring its place in the order up to date."""
        session.version += 1
        self._here[session] = None
        if session.gang is not None:
            self._gangs[session] = None
        surplus = 0.0
        if session.terms.tier is not Tier.BASIC:
            session.account.settle(now)
            aim = self.settings.targets.get(session.terms.tier, 0.0)
            surplus = round(session.account.fraction - aim, 1)
        if now < session.lease.protected_until:
            turn = 2
        else:
            turn = int(now < min(session.lease.quantum_end, self.hold_end(session)))
        entry = (
            turn,
            -surplus,
            session.memory * session.gpus,
            session.number,
            session.version,
            session,
        )
        self._push(self._pools.setdefault(session.lease.right, _pool()), entry)
        for quota in session.quotas:
            if quota.limits.devices < math.inf:
                self._push(self._limited.setdefault(quota, _pool()), entry)

    def _push(self, pool: Pool, entry: Entry) -> None:
        session = entry[-1]
        heap = pool[ORDER[session.terms.tier] * LEVELS + session.lease.level]
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self._here) + 64:
            heap[:] = [known for known in heap if known[4] == known[5].version]
            heapq.heapify(heap)

    def gangs(self) -> list[EngineSession]:
        """Return the gangs that execute."""
        return list(self._gangs)

    def put_all(self, now: float) -> None:
        """Bring all places up to date: what they depend on has changed."""
        for session in list(self._here):
            self.put(session, now)

    def remove(self, session: EngineSession) -> None:
        """Remove a session that stops; no effect if it is not here."""
        if session in self._here:
            del self._here[session]
            self._gangs.pop(session, None)
            session.version += 1

    def hold_end(self, session: EngineSession) -> float:
        """Return when a session has held its lease so long that any waiting session goes first."""
        return session.lease.granted_at + self.settings.max_hold.get(session.terms.tier, math.inf)

    def is_urgent(self, session: EngineSession, level: int, now: float) -> bool:
        """True if its tier puts it before others.

        An interactive cell with a tier target is urgent from the beginning: time until it has a
        device is all that it can lose.
        """
        if session.terms.goal == 0.0:
            return False
        if level <= INTERACTIVE and not self._is_throttled(session, level, now):
            return True
        return misses(session, self.settings.quanta[level], now)

    def is_reachable(self, waiting: EngineSession, victim: EngineSession) -> bool:
        """True if no guarantee of another virtual cluster protects the victim."""
        return victim.lease.right in ("", waiting.vc)

    def _outranks(
        self, waiting: EngineSession, level: int, victim: EngineSession, now: float
    ) -> bool:
        """True if an interactive cell of a premium session waits while a basic one executes."""
        return (
            waiting.terms.tier is Tier.PREMIUM
            and victim.terms.tier is Tier.BASIC
            and self._is_interactive(waiting, level, now)
        )

    def _is_interactive(self, waiting: EngineSession, level: int, now: float) -> bool:
        """True if an interactive cell waits whose user has not had too much."""
        return level <= INTERACTIVE and (
            waiting.wait.urgent or not self._is_throttled(waiting, level, now)
        )

    def may_preempt(
        self, waiting: EngineSession, level: int, victim: EngineSession, now: float
    ) -> bool:
        """True if a waiting session may preempt one that executes."""
        if (
            victim.phase is not Phase.RUNNING
            or not victim.terms.may_preempt
            or not self.is_reachable(waiting, victim)
        ):
            return False
        if now < victim.lease.protected_until:
            return now >= victim.lease.exposed_at and self._outranks(waiting, level, victim, now)
        if self.settings.max_hold and now >= self.hold_end(victim):
            return True
        if waiting.terms.tier is Tier.PREMIUM and self._outranks(waiting, level, victim, now):
            return True
        return self._precedes(waiting, level, victim, now, now >= victim.lease.quantum_end)

    def may_shrink(
        self, waiting: EngineSession, level: int, victim: EngineSession, now: float
    ) -> bool:
        """True if a waiting session may have a device that a gang can do without.

        The order is the same as for preemptions. But what a gang has beyond its least number of
        devices it got because they were idle, so that it gives them back at once: neither its
        minimum run time nor its quantum protects them.
        """
        if (
            victim.phase is not Phase.RUNNING
            or not victim.terms.may_preempt
            or not self.is_reachable(waiting, victim)
        ):
            return False
        premium = waiting.terms.tier is Tier.PREMIUM and victim.terms.tier is not Tier.PREMIUM
        if premium and self._is_interactive(waiting, level, now):
            return True
        return self._precedes(waiting, level, victim, now, expired=True)

    def _precedes(
        self, waiting: EngineSession, level: int, victim: EngineSession, now: float, expired: bool
    ) -> bool:
        """True if a waiting session comes before one that executes; `expired`: its quantum is."""
        victim_urgent = self.is_urgent(victim, victim.lease.level, now)
        if waiting.wait.urgent != victim_urgent:
            return waiting.wait.urgent
        if not waiting.wait.urgent:
            mine = self._is_throttled(waiting, level, now)
            theirs = self._is_throttled(victim, victim.lease.level, now)
            if mine != theirs:
                return theirs and (expired or level < victim.lease.level)
        if level != victim.lease.level:
            return level < victim.lease.level
        return expired and behind(waiting, victim, now) > 0.0

    def within(
        self, waiting: EngineSession, level: int, quota: SessionQuota, devices: int, now: float
    ) -> tuple[EngineSession, ...]:
        """Return sessions of one user or virtual cluster that may be preempted.

        They have at least this many devices together; empty if that is impossible.
        """
        found: list[EngineSession] = []
        for heap in _in_order(self._limited.get(quota)):
            seen: list[Entry] = []
            while heap and devices > 0 and len(seen) < PROBES:
                entry = heapq.heappop(heap)
                victim = entry[-1]
                if entry[4] != victim.version:
                    continue
                seen.append(entry)
                if self.may_preempt(waiting, level, victim, now):
                    found.append(victim)
                    devices -= victim.gpus
            for entry in seen:
                heapq.heappush(heap, entry)
            if devices <= 0:
                return tuple(found)
        return ()

    def find(
        self,
        waiting: EngineSession,
        level: int,
        now: float,
        cost: Callable[[EngineSession], float | None],
    ) -> EngineSession | None:
        """Return the first victim in order that may be preempted.

        `cost` returns the seconds to make room on the victim's device; None if that is impossible.
        """
        for name in ("", waiting.vc):
            for heap in _in_order(self._pools.get(name)):
                found = self._probe(heap, waiting, level, now, cost)
                if found is not None:
                    return found
        return None

    def _probe(
        self,
        heap: list[Entry],
        waiting: EngineSession,
        level: int,
        now: float,
        cost: Callable[[EngineSession], float | None],
    ) -> EngineSession | None:
        """Return the cheapest of the first few victims of one tier and level."""
        seen: list[Entry] = []
        found: EngineSession | None = None
        least = float("inf")
        while heap and len(seen) < PROBES:
            entry = heapq.heappop(heap)
            victim = entry[-1]
            if entry[4] != victim.version:
                continue
            seen.append(entry)
            if self.may_preempt(waiting, level, victim, now):
                seconds = cost(victim)
                if seconds is not None and seconds < least:
                    found, least = victim, seconds
        for entry in seen:
            heapq.heappush(heap, entry)
        return found


def _pool() -> Pool:
    return [[] for _ in range(3 * LEVELS)]


def _in_order(pool: Pool | None) -> Iterator[list[Entry]]:
    """Yield the heaps of a pool that are not empty: lowest tier first, and highest level."""
    if pool is not None:
        for tier in range(3):
            for level in range(LEVELS - 1, -1, -1):
                if heap := pool[tier * LEVELS + level]:
                    yield heap
