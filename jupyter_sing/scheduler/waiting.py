"""Sessions that wait, in the order in which they are to be served.

The order, most important first: virtual clusters below their guarantee; sessions whose tier is
about to be missed; tenants that are not throttled; level; fairness (virtual cluster, user,
session); arrival. There is a bucket per number of devices, urgency, level and virtual cluster;
in it a heap of users, and per user a heap of sessions. Tags never fall, so that an entry of a user
that is too low is noticed and put right when it reaches the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from jupyter_sing.scheduler.fairness import Flow, Ledger
from jupyter_sing.scheduler.state import Session

LEVELS = 4
INTERACTIVE = 1
"""Highest level at which a cell still counts as interactive."""


class _Bucket:
    """Sessions of one virtual cluster, size, urgency and level."""

    __slots__ = ("sessions", "users")

    def __init__(self) -> None:
        self.users: list[tuple[float, int, Flow]] = []
        # By user: (tag, arrival, version, session); entries of older versions are stale.
        self.sessions: dict[Flow, list[tuple[float, int, int, Session]]] = {}

    def add(self, session: Session, now: float) -> None:
        user = session.flow.parent
        assert user
        heap = self.sessions.get(user)
        if heap is None:
            heap = self.sessions[user] = []
            heapq.heappush(self.users, (user.at(now), user.number, user))
        heapq.heappush(heap, (session.flow.at(now), session.arrival, session.version, session))

    def first(self, now: float) -> Session | None:
        """Session that is owed the most, of the user that is owed the most."""
        while self.users:
            tag, number, user = self.users[0]
            heap = self.sessions[user]
            while heap and heap[0][2] != heap[0][3].version:
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(self.users)
                del self.sessions[user]
                continue
            present = user.at(now)
            if present > tag:
                heapq.heapreplace(self.users, (present, number, user))
                continue
            return heap[0][3]
        return None


class Blocked:
    """Who need not be looked at again in this round, since somebody before them failed.

    Whoever comes later in the order can stop nobody whom the first cannot stop, unless it may do so
    within the guarantee of its own virtual cluster. What needs more devices fails as well.
    """

    def __init__(self, has_own: Callable[[str], bool], promised: bool) -> None:
        self._has_own = has_own
        self._promised = promised
        self._common: int | None = None
        self._clusters: dict[str, int] = {}

    def add(self, vc: str, gpus: int) -> None:
        """Note that a session could not be served."""
        self._clusters[vc] = min(gpus, self._clusters.get(vc, gpus))
        if self._common is None or gpus < self._common:
            self._common = gpus

    def holds_all(self, gpus: int) -> bool:
        """Whether nobody of that size can be served: nothing is promised to anybody."""
        return not self._promised and self._common is not None and gpus >= self._common

    def holds(self, vc: str, gpus: int, below: bool) -> bool:
        """Whether sessions of that virtual cluster and size would fail, too."""
        own = self._clusters.get(vc)
        if own is not None and gpus >= own:
            return True
        if below or self._common is None or gpus < self._common:
            return False
        return not self._has_own(vc)


class Waiting:
    """All waiting sessions.

    `below` says whether a virtual cluster could have so many more guaranteed devices.
    """

    def __init__(
        self,
        ledger: Ledger,
        throttle: float,
        burst: float,
        below: Callable[[str, int], bool],
    ) -> None:
        self._ledger = ledger
        self.throttle = throttle
        self.burst = burst
        self._below = below
        self._buckets: dict[int, list[dict[Flow, _Bucket]]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._places: dict[Session, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, session: Session) -> bool:
        return session in self._places

    def add(self, session: Session, level: int, now: float) -> int:
        """Let a session wait; returns its position among those of its size, urgency and level."""
        index = (0 if session.urgent else LEVELS) + level
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
        return self._counts[place]

    def remove(self, session: Session) -> None:
        """Let a session wait no more."""
        place = self._places.pop(session, None)
        if place is not None:
            session.version += 1
            self._counts[place] -= 1

    def is_throttled(self, session: Session, level: int, now: float) -> bool:
        """Whether its user or virtual cluster had so much that all others go first.

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

    def best(self, now: float, blocked: Blocked) -> Session | None:
        """First of all that are not blocked."""
        chosen: Session | None = None
        least: tuple[int, int, float, float, float, int] | None = None
        for gpus, by_index in self._buckets.items():
            if blocked.holds_all(gpus):
                break  # sizes are in order
            found = self._best_of(gpus, by_index, now, blocked)
            if found is not None and (least is None or found[0] < least):
                least, chosen = found
        return chosen

    def _best_of(
        self,
        gpus: int,
        by_index: list[dict[Flow, _Bucket]],
        now: float,
        blocked: Blocked,
    ) -> tuple[tuple[int, int, float, float, float, int], Session] | None:
        throttled: tuple[tuple[int, int, float, float, float, int], Session] | None = None
        candidate: tuple[tuple[int, int, float, float, float, int], Session] | None = None
        for index, buckets in enumerate(by_index):
            if not self._counts.get((gpus, index)):
                buckets.clear()
                continue
            # Whoever comes at a later index can only be better by a guarantee.
            settled = candidate is not None
            empty = []
            for cluster, bucket in buckets.items():
                below = self._below(cluster.name, gpus)
                if (settled and not below) or blocked.holds(cluster.name, gpus, below):
                    continue
                session = bucket.first(now)
                if session is None:
                    empty.append(cluster)
                    continue
                user = session.flow.parent
                assert user
                rank = 0 if below else self._class(session, index % LEVELS, now)
                key = (
                    rank,
                    index,
                    cluster.at(now),
                    user.at(now),
                    session.flow.at(now),
                    session.arrival,
                )
                if rank == 3:
                    if throttled is None or key < throttled[0]:
                        throttled = (key, session)
                elif candidate is None or key < candidate[0]:
                    candidate = (key, session)
            for cluster in empty:
                del buckets[cluster]
        return candidate or throttled

    def _class(self, session: Session, level: int, now: float) -> int:
        if session.urgent:
            return 1
        return 3 if self.is_throttled(session, level, now) else 2
