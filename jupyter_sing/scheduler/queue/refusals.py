"""Devices of which nothing could be made for a session: it is served elsewhere, if it can be.

The pause after which such a device is tried again doubles, as each attempt costs somebody else a
turn. It is over at once when memory there becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_sing.scheduler.state import DeviceState, Session

PAUSE = 1.0
PAUSE_MAX = 16.0
"""First and longest pause, in seconds."""


@dataclass(slots=True)
class Refusal:
    """`pause`: seconds from the last attempt until the next, which may be `until` then."""

    until: float
    pause: float


class Refusals:
    """Which session was refused which device lately."""

    def __init__(self) -> None:
        self._known: dict[tuple[Session, DeviceState], Refusal] = {}

    def note(self, session: Session, device: DeviceState, now: float) -> float:
        """Note that nothing came of a lease; returns when the device may be tried again."""
        before = self._known.get((session, device))
        pause = min(PAUSE_MAX, 2.0 * before.pause) if before else PAUSE
        self._known[session, device] = Refusal(now + pause, pause)
        return now + pause

    def holds(self, session: Session, device: DeviceState, now: float) -> bool:
        """Whether a session is not to be granted a device yet."""
        found = self._known.get((session, device))
        return found is not None and now < found.until

    def until(self, session: Session, devices: Iterable[DeviceState], now: float) -> float:
        """When the first of these devices may be tried; now, if one of them may be."""
        known = [self._known.get((session, device)) for device in devices]
        return max(now, min((r.until if r else now for r in known), default=now))

    def forget(self, session: Session) -> None:
        """Note that a session executes, or is gone."""
        for key in [key for key in self._known if key[0] is session]:
            del self._known[key]

    def relent(self, device: DeviceState) -> None:
        """Note that there is more room on a device: it may be tried again at once."""
        for (_, other), found in self._known.items():
            if other is device:
                found.until = float("-inf")
