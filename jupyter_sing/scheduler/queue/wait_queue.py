"""Waiting sessions, in the order in which they are to be served.

The order, most important first: virtual clusters below their guarantee; sessions whose tier is
about to be missed; tenants that are not throttled; level; fairness (virtual cluster, user,
session); arrival. There is a bucket per number of devices, urgency, level and virtual cluster; in
it a heap of users, and per user a heap of sessions. Tags never fall, so an entry of a user that is
too low is noticed and corrected when it reaches the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger
from jupyter_sing.scheduler.state import EngineSession

LEVELS = 4
INTERACTIVE = 1
"""Highest level at which a cell still counts as interactive."""

Key: TypeAlias = tuple[int, int, float, float, float, int]

IsCapped: TypeAlias = Callable[[Flow, int, float], bool]
"""True if a user or virtual cluster may not have this many more devices now."""


class _Bucket:
    """Sessions of one virtual cluster, size, urgency and level.

    Users at a limit sleep: they are in `asleep` and not in `users`, until `wake`.
    """

    __slots__ = ("asleep", "sessions", "users")

    def __init__(self) -> None:
        self.asleep: dict[Flow, None] = {}
        self.users: list[tuple[float, int, Flow]] = []
        # By user: (tag, arrival, version, session); entries of older versions are stale.
        self.sessions: dict[Flow, list[tuple[float, int, int, EngineSession]]] = {}

    def add(self, session: EngineSession, now: float) -> None:
        user = session.flow.parent
        assert user
        heap = self.sessions.get(user)
        if heap is None:
            heap = self.sessions[user] = []
            heapq.heappush(self.users, (user.at(now), user.number, user))
        heapq.heappush(heap, (session.flow.at(now), session.wait.arrival, session.version, session))

    def first(self, gpus: int, now: float, is_capped: IsCapped) -> EngineSession | None:
        """Return the session that is owed the most, of the user that is owed the most."""
        while self.users:
            tag, number, user = self.users[0]
            heap = self.sessions[user]
            while heap and heap[0][2] != heap[0][3].version:
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(self.users)
                del self.sessions[user]
                continue
            assert user.quota
            if user.quota.bounded and is_capped(user, gpus, now):
                heapq.heappop(self.users)
                self.asleep[user] = None
                user.quota.asleep[self] = None
                continue
            present = user.at(now)
            if present > tag:
                heapq.heapreplace(self.users, (present, number, user))
                continue
            return heap[0][3]
        return None

    def of(self, user: Flow) -> EngineSession | None:
        """Return the session of a user that is owed the most."""
        heap = self.sessions.get(user)
        while heap:
            if heap[0][2] == heap[0][3].version:
                return heap[0][3]
            heapq.heappop(heap)
        return None

    def wake(self, user: Flow, now: float) -> None:
        """Consider a user again who was at a limit."""
        if user in self.asleep:
            del self.asleep[user]
            heapq.heappush(self.users, (user.at(now), user.number, user))


class Blocked:
    """Sessions to skip for the rest of a round, because one that precedes them could not be served.

    A session that comes later in the order can preempt no session that an earlier one cannot
    preempt, except within the guarantee of its own virtual cluster. Sessions that need more devices
    fail, too.
    """

    def __init__(self, has_own: Callable[[str], bool], guaranteed: bool) -> None:
        self._has_own = has_own
        self.guaranteed = guaranteed
        self._common: int | None = None
        self._clusters: dict[str, int] = {}

    def add(self, vc: str, gpus: int) -> None:
        """Record that a session could not be served."""
        self._clusters[vc] = min(gpus, self._clusters.get(vc, gpus))
        if self._common is None or gpus < self._common:
            self._common = gpus

    def holds_all(self, gpus: int) -> bool:
        """True if no session of that size can be served; only if there are no guarantees."""
        return not self.guaranteed and self._common is not None and gpus >= self._common

    def holds(self, vc: str, gpus: int, below: bool) -> bool:
        """True if sessions of that virtual cluster and size would fail, too."""
        own = self._clusters.get(vc)
        if own is not None and gpus >= own:
            return True
        if below or self._common is None or gpus < self._common:
            return False
        return not self._has_own(vc)


class WaitQueue:
    """All waiting sessions.

    `below` says whether a virtual cluster could have this many more guaranteed devices. `is_capped`
    says whether a user or virtual cluster is at a limit: its sessions are passed over.
    """

    def __init__(
        self,
        ledger: ServiceLedger,
        throttle: float,
        burst: float,
        below: Callable[[str, int], bool],
        is_capped: IsCapped,
    ) -> None:
        self._ledger = ledger
        self._is_capped = is_capped
        self.throttle = throttle
        self.burst = burst
        self._below = below
        self._buckets: dict[int, list[dict[Flow, _Bucket]]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._places: dict[EngineSession, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, session: EngineSession) -> bool:
        return session in self._places

    def sessions(self) -> list[EngineSession]:
        """Return all sessions that wait to be served."""
        return list(self._places)

    def add(self, session: EngineSession, level: int, now: float) -> None:
        """Let a session wait."""
        index = (0 if session.wait.urgent else LEVELS) + level
        by_index = self._buckets.get(session.gpus)
        if by_index is None:
            by_index = self._buckets[session.gpus] = [{} for _ in range(2 * LEVELS)]
            self._buckets = dict(sorted(self._buckets.items()))
        user = session.flow.parent
        assert user
        assert user.parent
        bucket = by_index[index].get(user.parent)
        if bucket is None:
            bucket = by_index[index][user.parent] = _Bucket()
        session.version += 1
        place = (session.gpus, index)
        self._places[session] = place
        bucket.add(session, now)
        self._counts[place] = self._counts.get(place, 0) + 1

    def remove(self, session: EngineSession) -> None:
        """Remove a session."""
        place = self._places.pop(session, None)
        if place is not None:
            session.version += 1
            self._counts[place] -= 1

    def wake(self, user: Flow, now: float) -> None:
        """Consider a user again who is no longer at a limit."""
        assert user.quota
        for bucket in list(user.quota.asleep):
            bucket.wake(user, now)
        user.quota.asleep.clear()

    def is_throttled(self, session: EngineSession, level: int, now: float) -> bool:
        """True if its user or virtual cluster had so much service that all others go first.

        At the interactive levels, users have an allowance beyond that.
        """
        user = session.flow.parent
        assert user
        assert user.parent
        if (
            self._ledger.lead(user, now) <= self.throttle
            and self._ledger.lead(user.parent, now) <= self.throttle
        ):
            return False
        return level > INTERACTIVE or self._ledger.burst(user, 0.0, now) > self.burst

    def would_throttle(self, session: EngineSession, level: int, now: float) -> bool:
        """Return `is_throttled` without side effects, for forecasts."""
        user = session.flow.parent
        assert user
        assert user.parent
        leads = (self._ledger.lead(flow, now) for flow in (user, user.parent))
        if max(leads) <= self.throttle:
            return False
        return level > INTERACTIVE or self._ledger.unpaid(user, now) > self.burst

    def best(self, now: float, blocked: Blocked) -> EngineSession | None:
        """Return the first of all sessions that are not blocked."""
        chosen: EngineSession | None = None
        least: Key | None = None
        for gpus, by_index in self._buckets.items():
            if blocked.holds_all(gpus):
                break  # sizes are in order
            found = self._best_of(gpus, by_index, now, blocked)
            if found is not None and (least is None or found[0] < least):
                least, chosen = found
        return chosen

    def best_within(self, flow: Flow, now: float) -> EngineSession | None:
        """Return the first session of a user or virtual cluster, at its limit or not."""
        best: tuple[tuple[int, float, float, int], EngineSession] | None = None
        for gpus, by_index in self._buckets.items():
            for index, buckets in enumerate(by_index):
                bucket = buckets.get(flow.parent or flow)
                if bucket is None:
                    continue
                if flow.parent is None:
                    session = bucket.first(gpus, now, self._is_capped)
                else:
                    session = bucket.of(flow)
                if session is None:
                    continue
                user = session.flow.parent
                assert user
                key = (index, user.at(now), session.flow.at(now), session.wait.arrival)
                if best is None or key < best[0]:
                    best = key, session
                break  # later sessions of this size have a later index
        return best[1] if best else None

    def _best_of(
        self,
        gpus: int,
        by_index: list[dict[Flow, _Bucket]],
        now: float,
        blocked: Blocked,
    ) -> tuple[Key, EngineSession] | None:
        throttled: tuple[Key, EngineSession] | None = None
        candidate: tuple[Key, EngineSession] | None = None
        for index, buckets in enumerate(by_index):
            if not self._counts.get((gpus, index)):
                buckets.clear()
                continue
            # Only a guarantee can put a session with a later index first.
            settled = candidate is not None
            if settled and not blocked.guaranteed:
                break
            empty = []
            for cluster, bucket in buckets.items():
                below = blocked.guaranteed and self._below(cluster.name, gpus)
                if (settled and not below) or blocked.holds(cluster.name, gpus, below):
                    continue
                assert cluster.quota
                if cluster.quota.bounded and self._is_capped(cluster, gpus, now):
                    continue
                session = bucket.first(gpus, now, self._is_capped)
                if session is None:
                    if not bucket.asleep:
                        empty.append(cluster)
                    continue
                key = self._key(session, index, below, now)
                if key[0] == 3:
                    if throttled is None or key < throttled[0]:
                        throttled = (key, session)
                elif candidate is None or key < candidate[0]:
                    candidate = (key, session)
            for cluster in empty:
                del buckets[cluster]
        return candidate or throttled

    def _key(self, session: EngineSession, index: int, below: bool, now: float) -> Key:
        """Return the place of a session in the order; less is sooner."""
        user = session.flow.parent
        assert user
        assert user.parent
        rank = 0 if below else self._class(session, index % LEVELS, now)
        tags = (user.parent.at(now), user.at(now), session.flow.at(now))
        return (rank, index, *tags, session.wait.arrival)

    def order(self, now: float) -> list[tuple[Key, EngineSession]]:
        """Return all waiting sessions in the order of service, with their places in it."""
        found = []
        for each, (gpus, index) in self._places.items():
            key = self.place_of(each, index % LEVELS, each.wait.urgent, now, now)
            found.append(((0, *key[1:]) if self._below(each.vc, gpus) else key, each))
        found.sort(key=lambda each: each[0])
        return found

    def place_of(
        self, session: EngineSession, level: int, urgent: bool, at: float, now: float
    ) -> Key:
        """Return the place that a session would have if it waited at a level from a time on."""
        user = session.flow.parent
        assert user
        assert user.parent
        rank = 1 if urgent else 3 if self.would_throttle(session, level, now) else 2
        index = (0 if urgent else LEVELS) + level
        tags = (user.parent.at(at), user.at(at), session.flow.at(at))
        return (rank, index, *tags, session.wait.arrival)

    def _class(self, session: EngineSession, level: int, now: float) -> int:
        if session.wait.urgent:
            return 1
        return 3 if self.is_throttled(session, level, now) else 2
