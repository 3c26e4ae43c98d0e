"""Sessions that execute and could be stopped, in the order in which they are to be victims.

The order, first victim first: what was borrowed beyond guarantees; Basic, then Standard, then
Premium, those with most surplus first; highest level; least to move. Those whose minimum run time
is not over come last: they stop for premium sessions only, if they are basic ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from jupyter_sing.scheduler.fairness.tier_targets import threshold
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE, LEVELS
from jupyter_sing.scheduler.settings import Settings, Tier
from jupyter_sing.scheduler.state import Phase, Session, SessionQuota

ORDER = {Tier.BASIC: 0, Tier.STANDARD: 1, Tier.PREMIUM: 2}
PROBES = 8
"""Victims per tier and level that are looked at more closely."""

Entry: TypeAlias = tuple[int, float, int, int, int, Session]
Pool: TypeAlias = list[list[Entry]]


def misses(session: Session, quantum: float, now: float) -> bool:
    """Whether it misses its tier unless it executes soon, or goes on executing."""
    if session.goal == 0.0:
        return False
    session.account.settle(now)
    return session.account.slack(session.goal) < threshold(session.switch, quantum)


def behind(one: Session, other: Session, now: float) -> float:
    """Seconds of weighted service by which `one` is behind `other`, where their paths part.

    That is from the root. Negative: it is ahead.
    """
    mine, theirs = one.flow, other.flow
    while mine.parent is not theirs.parent:
        assert mine.parent
        assert theirs.parent
        mine, theirs = mine.parent, theirs.parent
    return theirs.at(now) - mine.at(now)


class Running:
    """Sessions that execute.

    Attributes
    ----------
    settings
        Those of the engine.
    """

    def __init__(
        self,
        settings: Settings,
        is_throttled: Callable[[Session, int, float], bool],
    ) -> None:
        self.settings = settings
        self._is_throttled = is_throttled
        # By virtual cluster, "" for what no guarantee protects: a heap per tier and level.
        self._pools: dict[str, Pool] = {}
        # The same of all sessions of whoever has a limit of devices.
        self._limited: dict[SessionQuota, Pool] = {}
        self._here: dict[Session, None] = {}

    def __len__(self) -> int:
        return len(self._here)

    def has_own(self, vc: str) -> bool:
        """Whether sessions execute, or did, within the guarantee of a virtual cluster."""
        return vc in self._pools

    def put(self, session: Session, now: float) -> None:
        """Take in a session, or bring its place in the order up to date."""
        session.version += 1
        self._here[session] = None
        surplus = 0.0
        if session.tier is not Tier.BASIC:
            session.account.settle(now)
            aim = self.settings.targets.get(session.tier, 0.0)
            surplus = round(session.account.fraction - aim, 1)
        if now < session.protected_until:
            turn = 2
        else:
            turn = int(now < min(session.quantum_end, self.hold_end(session)))
        entry = (
            turn,
            -surplus,
            session.memory * session.gpus,
            session.number,
            session.version,
            session,
        )
        self._push(self._pools.setdefault(session.right, _pool()), entry)
        for quota in session.quotas:
            if quota.limits.devices < math.inf:
                self._push(self._limited.setdefault(quota, _pool()), entry)

    def _push(self, pool: Pool, entry: Entry) -> None:
        session = entry[-1]
        heap = pool[ORDER[session.tier] * LEVELS + session.running_level]
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self._here) + 64:
            heap[:] = [known for known in heap if known[4] == known[5].version]
            heapq.heapify(heap)

    def put_all(self, now: float) -> None:
        """Bring all places up to date: what they hang on has changed."""
        for session in list(self._here):
            self.put(session, now)

    def remove(self, session: Session) -> None:
        """Forget a session that stops; nothing if it is not here."""
        if session in self._here:
            del self._here[session]
            session.version += 1

    def hold_end(self, session: Session) -> float:
        """When a session has held its lease for so long that whoever waits goes first."""
        return session.granted_at + self.settings.max_hold.get(session.tier, math.inf)

    def is_urgent(self, session: Session, level: int, now: float) -> bool:
        """Whether its tier puts it before others.

        An interactive cell with a promise is urgent from the beginning: time to its device is all
        that it can lose.
        """
        if session.goal == 0.0:
            return False
        if level <= INTERACTIVE and not self._is_throttled(session, level, now):
            return True
        return misses(session, self.settings.quanta[level], now)

    def is_reachable(self, waiting: Session, victim: Session) -> bool:
        """Whether no guarantee of another virtual cluster protects the victim."""
        return victim.right in ("", waiting.vc)

    def _outranks(self, waiting: Session, level: int, victim: Session, now: float) -> bool:
        """Whether a cell of a premium session has come while a basic one executes."""
        return (
            waiting.tier is Tier.PREMIUM
            and victim.tier is Tier.BASIC
            and level <= INTERACTIVE
            and (waiting.urgent or not self._is_throttled(waiting, level, now))
        )

    def may_preempt(self, waiting: Session, level: int, victim: Session, now: float) -> bool:
        """Whether a waiting session goes before one that executes."""
        if (
            victim.phase is not Phase.RUNNING
            or not victim.may_preempt
            or not self.is_reachable(waiting, victim)
        ):
            return False
        if now < victim.protected_until:
            return now >= victim.exposed_at and self._outranks(waiting, level, victim, now)
        if self.settings.max_hold and now >= self.hold_end(victim):
            return True
        if waiting.tier is Tier.PREMIUM and self._outranks(waiting, level, victim, now):
            return True
        expired = now >= victim.quantum_end
        victim_urgent = self.is_urgent(victim, victim.running_level, now)
        if waiting.urgent != victim_urgent:
            return waiting.urgent
        if not waiting.urgent:
            mine = self._is_throttled(waiting, level, now)
            theirs = self._is_throttled(victim, victim.running_level, now)
            if mine != theirs:
                return theirs and (expired or level < victim.running_level)
        if level != victim.running_level:
            return level < victim.running_level
        return expired and behind(waiting, victim, now) > 0.0

    def within(
        self, waiting: Session, level: int, quota: SessionQuota, devices: int, now: float
    ) -> tuple[Session, ...]:
        """Find sessions of one user or virtual cluster that may be preempted.

        Returns as many as give so many devices; none, if these are not to be had.
        """
        found: list[Session] = []
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
        waiting: Session,
        level: int,
        now: float,
        cost: Callable[[Session], float | None],
    ) -> Session | None:
        """Find the first victim in order that may be preempted.

        `cost` is in seconds: of making room at the victim's place; None if there is none to make.
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
        waiting: Session,
        level: int,
        now: float,
        cost: Callable[[Session], float | None],
    ) -> Session | None:
        """Cheapest of the first few victims of one tier and level."""
        seen: list[Entry] = []
        found: Session | None = None
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
    """The heaps of a pool that are not empty: lowest tier first, and highest level."""
    if pool is not None:
        for tier in range(3):
            for level in range(LEVELS - 1, -1, -1):
                if heap := pool[tier * LEVELS + level]:
                    yield heap
