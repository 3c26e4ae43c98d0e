"""Who has executed on a device lately, and for how long. Pure: it is told the time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

#: A share is one of the device time of so many seconds.
WINDOW_SECONDS = 30.0
#: Who had a turn within so many seconds, and wants another one, takes turns.
LATELY_SECONDS = 20.0
#: So long after its last turn somebody still counts who wants no other one yet.
AFTER_SECONDS = 3.0


class History:
    """The turns of one device, as far back as a share is counted; moments are seconds."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._past: deque[tuple[str, float, float]] = deque()

    def began(self, session: str, now: float) -> None:
        """A session may execute from now on."""
        self._now[session] = now

    def ended(self, session: str, now: float) -> None:
        """It may execute no more."""
        self._past.append((session, self._now.pop(session), now))
        while self._past and self._past[0][2] < now - WINDOW_SECONDS:
            self._past.popleft()

    def since(self, session: str, now: float) -> float:
        """Seconds since its last turn: 0 in it, infinite without one."""
        if session in self._now:
            return 0.0
        ends = (end for other, _, end in self._past if other == session)
        return now - max(ends, default=float("-inf"))

    def first(self, session: str, now: float) -> float:
        """When its first turn in the window began; infinite without one."""
        return min((b for other, b, _ in self._spans(now) if other == session), default=math.inf)

    def seconds(self, now: float, since: float = -math.inf) -> dict[str, float]:
        """Device time of all who had some in the window, or in the part of it from a moment on."""
        start, found = max(since, now - WINDOW_SECONDS), dict[str, float]()
        for session, begin, end in self._spans(now):
            if end >= start:
                found[session] = found.get(session, 0.0) + end - max(begin, start)
        return found

    def _spans(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Turns and their beginnings and ends; those that last end now."""
        yield from self._past
        yield from ((session, begin, now) for session, begin in self._now.items())
