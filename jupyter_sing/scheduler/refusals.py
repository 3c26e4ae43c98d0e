"""Devices on which a grant to a session failed: it is served elsewhere, if possible.

The pause before a retry on such a device doubles, as each attempt costs another session a quantum.
It ends at once when memory of the device becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_sing.scheduler.state import EngineDevice, EngineSession

PAUSE = 1.0
PAUSE_MAX = 16.0
"""First and longest pause, in seconds."""


@dataclass(slots=True)
class Refusal:
    """`pause`: seconds from the last attempt to the next; `until`: when that may be."""

    until: float
    pause: float


class Refusals:
    """Recent failures of grants, by session and device."""

    def __init__(self) -> None:
        self._known: dict[tuple[EngineSession, EngineDevice], Refusal] = {}

    def note(self, session: EngineSession, device: EngineDevice, now: float) -> float:
        """Record that a lease failed; return when the device may be tried again."""
        before = self._known.get((session, device))
        pause = min(PAUSE_MAX, 2.0 * before.pause) if before else PAUSE
        self._known[session, device] = Refusal(now + pause, pause)
        return now + pause

    def holds(self, session: EngineSession, device: EngineDevice, now: float) -> bool:
        """True if a session must not be granted a device yet."""
        found = self._known.get((session, device))
        return found is not None and now < found.until

    def until(self, session: EngineSession, devices: Iterable[EngineDevice], now: float) -> float:
        """Return when the first of these devices may be tried; now, if one of them may be."""
        known = [self._known.get((session, device)) for device in devices]
        return max(now, min((r.until if r else now for r in known), default=now))

    def forget(self, session: EngineSession) -> None:
        """Forget the failures of a session that executes, or was closed."""
        for key in [key for key in self._known if key[0] is session]:
            del self._known[key]

    def relent(self, device: EngineDevice) -> None:
        """Record that there is more room on a device: it may be tried again at once."""
        for (_, other), found in self._known.items():
            if other is device:
                found.until = float("-inf")
