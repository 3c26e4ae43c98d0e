"""Why a session waits, in a sentence; at which place, and for how long about."""

from __future__ import annotations

import math

from jupyter_sing.scheduler.decisions import Queued
from jupyter_sing.scheduler.leases import Leases
from jupyter_sing.scheduler.limits import GIB, Limiter
from jupyter_sing.scheduler.serving import Serving
from jupyter_sing.scheduler.state import Phase, Session
from jupyter_sing.scheduler.waiting import Waiting


class Explaining:
    """Answers the question of somebody who waits.

    Attributes
    ----------
    turn
        Moving average of how long leases last, in seconds.
    """

    def __init__(
        self, waiting: Waiting, limiter: Limiter, leases: Leases, serving: Serving
    ) -> None:
        self._waiting = waiting
        self._limiter = limiter
        self._leases = leases
        self._serving = serving
        self._largest = max((device.memory for device in leases.devices.values()), default=0)
        self.turn = 1.0

    def ended(self, seconds: float) -> None:
        """Note how long a lease has lasted."""
        self.turn += 0.05 * (seconds - self.turn)

    def explain(self, session: Session, now: float) -> Queued | None:
        """Say why a session waits; None if it does not."""
        if session.phase is Phase.RESERVED:
            return Queued(session.id, 1, 0.0, self._leases.awaited(session))
        if session.phase is not Phase.WAITING:
            return None
        never = self._never(session)
        if never is not None:
            return Queued(session.id, self._place(session, now), math.inf, never)
        limit = self._limiter.reason(session, now)
        if limit is not None:
            position = 1 + self._waiting.ahead(session, limit.flow, now)
            seconds = limit.seconds
            if seconds is None:
                seconds = position / max(1, limit.devices) * self.turn
            return Queued(session.id, position, seconds, limit.text)
        position = self._place(session, now)
        devices = 1 if session.bound is not None else len(self._leases.devices)
        wait = position / max(1, devices) * self.turn
        return Queued(session.id, position, wait, self._usual(session, now))

    def _place(self, session: Session, now: float) -> int:
        return 1 + self._waiting.ahead(session, None, now)

    def _never(self, session: Session) -> str | None:
        """What has to change before it can have a device at all."""
        if session in self._serving.hopeless:
            widest = self._serving.widest
            most = f"{widest} device{'' if widest == 1 else 's'}"
            return f"It needs {session.gpus} devices at once, and {most} is the most there can be"
        if session.memory > self._largest:
            return (
                f"It has {session.memory / GIB:.1f} GiB, and the largest device"
                f" {self._largest / GIB:.1f} GiB"
            )
        return None

    def _usual(self, session: Session, now: float) -> str:
        if session.moving:
            return "its memory is on the way to another place"
        if now < session.not_before:
            return "what was tried last has failed, and is tried again soon"
        count = len(self._waiting)
        devices = len(self._leases.devices)
        wanted = "1 device" if devices == 1 else f"{devices} devices"
        return f"{count} session{' waits' if count == 1 else 's wait'} for {wanted}"
