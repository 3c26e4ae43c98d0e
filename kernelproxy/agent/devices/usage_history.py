"""Recent turns of sessions on a device, and their duration. Pure: the time is a parameter."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

#: A share is one of the device time of the last so many seconds.
WINDOW_SECONDS = 30.0
#: A session takes turns if it had one in the last so many seconds, and wants another one.
LATELY_SECONDS = 20.0
#: A session that does not want another turn yet still counts for so long after its last one.
AFTER_SECONDS = 3.0


class UsageHistory:
    """The turns on one device, as far back as shares are counted; all times are in seconds."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._past: deque[tuple[str, float, float]] = deque()

    def began(self, session: str, now: float) -> None:
        """Note that a session may execute from now on."""
        self._now[session] = now

    def ended(self, session: str, now: float) -> None:
        """Note that a session may not execute any more."""
        self._past.append((session, self._now.pop(session), now))
        while self._past and self._past[0][2] < now - WINDOW_SECONDS:
            self._past.popleft()

    def since(self, session: str, now: float) -> float:
        """Return the seconds since its last turn: 0 during a turn, infinite without one."""
        if session in self._now:
            return 0.0
        ends = (end for other, _, end in self._past if other == session)
        return now - max(ends, default=float("-inf"))

    def first(self, session: str, now: float) -> float:
        """Return when its first turn in the window began; infinite without one."""
        return min((b for other, b, _ in self._spans(now) if other == session), default=math.inf)

    def seconds(self, now: float, since: float = -math.inf) -> dict[str, float]:
        """Return the device time of each session in the window, or in its part after `since`."""
        start, found = max(since, now - WINDOW_SECONDS), dict[str, float]()
        for session, begin, end in self._spans(now):
            if end >= start:
                found[session] = found.get(session, 0.0) + end - max(begin, start)
        return found

    def _spans(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Yield turns with their beginnings and ends; a turn that continues ends now."""
        yield from self._past
        yield from ((session, begin, now) for session, begin in self._now.items())
