"""Sessions that execute and could be stopped, in the order in which they are to be victims.

The order, first victim first: what was borrowed beyond guarantees; Basic, then Standard, then
Premium, those with most surplus first; highest level; least to move. A session is here only once
its minimum run time is over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

from jupyter_sing.scheduler.events import Tier
from jupyter_sing.scheduler.state import Phase, Session
from jupyter_sing.scheduler.tiers import TARGETS, threshold
from jupyter_sing.scheduler.waiting import INTERACTIVE, LEVELS

ORDER = {Tier.BASIC: 0, Tier.STANDARD: 1, Tier.PREMIUM: 2}
PROBES = 8
"""Victims per tier and level that are looked at more closely."""

Entry: TypeAlias = tuple[bool, float, int, int, int, Session]


def target(session: Session) -> float:
    """Fraction that the session was promised; 0 if nothing could be."""
    return TARGETS[session.tier] if session.kept else 0.0


def misses(session: Session, quantum: float, now: float) -> bool:
    """Whether it misses its tier unless it executes soon, or goes on executing."""
    goal = target(session)
    if goal == 0.0:
        return False
    session.account.settle(now)
    return session.account.slack(goal) < threshold(session.switch, quantum)


def owed_more(one: Session, other: Session, now: float) -> bool:
    """Whether fairness puts `one` before `other`, where their paths from the root part."""
    mine, theirs = one.flow, other.flow
    while mine.parent is not theirs.parent:
        assert mine.parent
        assert theirs.parent
        mine, theirs = mine.parent, theirs.parent
    return mine.at(now) < theirs.at(now)


class Running:
    """Sessions that execute beyond their minimum run time."""

    def __init__(
        self,
        quanta: Callable[[int], float],
        is_throttled: Callable[[Session, int, float], bool],
    ) -> None:
        self._quanta = quanta
        self._is_throttled = is_throttled
        # By virtual cluster, "" for what no guarantee protects: a heap per tier and level.
        self._pools: dict[str, list[list[Entry]]] = {}
        self._here: dict[Session, None] = {}

    def __len__(self) -> int:
        return len(self._here)

    def has_own(self, vc: str) -> bool:
        """Whether sessions execute, or did, within the guarantee of a virtual cluster."""
        return vc in self._pools

    def put(self, session: Session, now: float) -> None:
        """Take in a session, or bring its place in the order up to date."""
        pool = self._pools.setdefault(
            session.vc if session.guaranteed else "", [[] for _ in range(3 * LEVELS)]
        )
        session.version += 1
        self._here[session] = None
        surplus = 0.0
        if session.tier is not Tier.BASIC:
            session.account.settle(now)
            surplus = round(session.account.fraction - TARGETS[session.tier], 1)
        heapq.heappush(
            pool[ORDER[session.tier] * LEVELS + session.running_level],
            (
                now < session.quantum_end,
                -surplus,
                session.memory * session.gpus,
                session.number,
                session.version,
                session,
            ),
        )

    def remove(self, session: Session) -> None:
        """Forget a session that stops; nothing if it is not here."""
        if session in self._here:
            del self._here[session]
            session.version += 1

    def is_urgent(self, session: Session, level: int, now: float) -> bool:
        """Whether its tier puts it before others.

        An interactive cell with a promise is urgent from the beginning: time to its device is all
        that it can lose.
        """
        if target(session) == 0.0:
            return False
        if level <= INTERACTIVE and not self._is_throttled(session, level, now):
            return True
        return misses(session, self._quanta(level), now)

    def is_reachable(self, waiting: Session, victim: Session) -> bool:
        """Whether no guarantee of another virtual cluster protects the victim."""
        return not victim.guaranteed or victim.vc == waiting.vc

    def may_preempt(self, waiting: Session, level: int, victim: Session, now: float) -> bool:
        """Whether a waiting session goes before one that executes."""
        if (
            victim.phase is not Phase.RUNNING
            or not victim.may_preempt
            or now < victim.protected_until
            or not self.is_reachable(waiting, victim)
        ):
            return False
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
        return expired and owed_more(waiting, victim, now)

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
            pool = self._pools.get(name)
            if pool is None:
                continue
            for tier in range(3):
                for at in range(LEVELS - 1, -1, -1):
                    heap = pool[tier * LEVELS + at]
                    found = self._probe(heap, waiting, level, now, cost) if heap else None
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
