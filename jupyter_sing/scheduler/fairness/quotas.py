"""Present and recent use of a user or a virtual cluster, beside its limits.

All counters are updated at each change. A comparison with a limit therefore costs the same,
regardless of the number of sessions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from jupyter_sing.scheduler.settings import QuotaLimits

DAY = 86_400.0
SLOT = 600.0
"""Length of a slot in seconds. A slot is dropped as a whole, a day after its end."""

UNLIMITED = QuotaLimits()


class Day:
    """Device seconds of the last 24 hours, in slots of ten minutes."""

    __slots__ = ("_slots", "_total")

    def __init__(self) -> None:
        self._slots: deque[list[float]] = deque()  # of [slot, seconds], oldest first
        self._total = 0.0

    def add(self, begin: float, end: float, devices: float) -> None:
        """Record the use of this many devices from one time to another."""
        while begin < end:
            slot = math.floor(begin / SLOT)
            until = min(end, (slot + 1) * SLOT)
            if until <= begin:  # a slot shorter than the resolution of the clock
                until = end
            self.put(slot, devices * (until - begin))
            begin = until

    def put(self, slot: int, seconds: float) -> None:
        """Add use to a slot, which must not be before any other."""
        if self._slots and self._slots[-1][0] >= slot:
            self._slots[-1][1] += seconds
        else:
            self._slots.append([slot, seconds])
        self._total += seconds

    def used(self, now: float) -> float:
        """Return the seconds that count at a time: never less than those of the last 24 hours."""
        while self._slots and (self._slots[0][0] + 1) * SLOT <= now - DAY:
            self._total -= self._slots.popleft()[1]
        if not self._slots:
            self._total = 0.0
        return self._total

    def below(self, limit: float, now: float) -> float:
        """Return when less than the limit will count if nothing more is used; `math.inf`: never."""
        left = self.used(now)
        if left < limit:
            return now
        for slot, seconds in self._slots:
            left -= seconds
            if left < limit:
                return (slot + 1) * SLOT + DAY
        return math.inf if limit <= 0.0 else now + DAY

    def slots(self) -> Iterator[tuple[int, float]]:
        """Return all slots with use, oldest first."""
        return ((int(slot), seconds) for slot, seconds in self._slots)


class Holder(Protocol):
    """A session, as far as quotas know it."""

    gpus: int


Of = TypeVar("Of")
Who = TypeVar("Who", bound=Holder)


class Quota(Generic[Of, Who]):
    """Use of resources of a user or virtual cluster, and its limits.

    Its type parameters are the type of the user or virtual cluster, and that of sessions.

    Attributes
    ----------
    flow, whose
        The user or virtual cluster, and its user-facing name.
    limits, bounded
        Its limits, and whether there are any.
    taken
        Devices that its sessions hold or have reserved.
    holders
        Those sessions.
    memory
        Bytes of its sessions on devices.
    coming
        Bytes that reservations will add.
    residents
        Bytes of each of its sessions on devices, least recently used first.
    short
        Sessions that wait for room within the limit of memory.
    asleep
        Buckets of waiting sessions that leave this user out while it is at a limit.
    returns_at
        Its device time is used up; it is checked again then.
    alarm
        When to check whether its device time is used up.
    retry_at
        When those of `short` are retried, whatever happens until then.
    """

    __slots__ = (
        "_coming",
        "_relieved",
        "alarm",
        "asleep",
        "bounded",
        "coming",
        "flow",
        "holders",
        "limits",
        "memory",
        "residents",
        "retry_at",
        "returns_at",
        "short",
        "taken",
        "whose",
    )

    def __init__(self, flow: Of, whose: str, relieved: dict[Of, None]) -> None:
        self.flow = flow
        self.whose = whose
        self.limits = UNLIMITED
        self.bounded = False
        self.taken = 0
        self.holders: dict[Who, None] = {}
        self.memory = 0
        self.coming = 0
        self.residents: dict[Who, int] = {}
        self.short: dict[Who, None] = {}
        self.asleep: dict[Any, None] = {}
        self.retry_at = self.returns_at = -math.inf
        self.alarm = math.inf
        self._coming: dict[Who, int] = {}
        self._relieved = relieved

    def relieve(self) -> None:
        """Record that sessions which wait for a limit may fit now."""
        if self.asleep or self.short:
            self._relieved[self.flow] = None

    def claim(self, session: Who) -> None:
        """Count a session as holding devices."""
        if session not in self.holders:
            self.holders[session] = None
            self.taken += session.gpus

    def leave(self, session: Who) -> None:
        """Count a session as holding none."""
        self.expect(session, 0)
        if session in self.holders:
            del self.holders[session]
            self.taken -= session.gpus
            if session in self.residents:  # it is now the most recently used
                self.residents[session] = self.residents.pop(session)
            self.relieve()

    def count(self, session: Who, change: int) -> None:
        """Add to the bytes of a session on devices."""
        self.memory += change
        size = self.residents.pop(session, 0) + change
        if size > 0:
            self.residents[session] = size
        if change < 0:
            self.relieve()

    def expect(self, session: Who, size: int) -> None:
        """Set the bytes that a session is about to load."""
        self.coming += size - self._coming.pop(session, 0)
        if size:
            self._coming[session] = size
        else:
            self.relieve()

    def transfer(self, session: Who, other: Quota[Of, Who]) -> None:
        """Move everything that is counted for a session to another quota."""
        if session in self.holders:
            other.claim(session)
        size, coming = self.residents.get(session, 0), self._coming.get(session, 0)
        other.count(session, size)
        other.expect(session, coming)
        self.count(session, -size)
        self.leave(session)
