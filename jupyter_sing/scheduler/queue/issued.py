"""Decisions that the engine has made and not returned yet, and counts of them."""

from __future__ import annotations

from jupyter_sing.scheduler.decisions import Decision, Preempt, PrepareResize
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Phase


class IssuedDecisions:
    """Decisions in their order, and how many of each kind there were.

    Attributes
    ----------
    token
        The last one that was given to a lease.
    """

    def __init__(self) -> None:
        self._decisions: list[Decision] = []
        self.append = self._decisions.append
        self.token = 0
        self.switches = 0
        self.preemptions = 0
        self.evictions = 0
        self.migrations = 0

    def take(self) -> list[Decision]:
        """Return the decisions since the last call."""
        found = self._decisions.copy()
        self._decisions.clear()
        return found

    def preempt(self, session: EngineSession, reason: str, now: float, nadir: float = 0.0) -> None:
        """Request the end of a lease."""
        self.preemptions += 1
        self._stop(session, reason, now, nadir, 0)

    def resize(
        self, session: EngineSession, devices: int, reason: str, now: float, nadir: float = 0.0
    ) -> None:
        """Request the end of a lease that the gang continues at once on this many devices."""
        assert session.gang is not None
        session.gang.resize = devices
        self._stop(session, reason, now, nadir, devices)

    def prepare(
        self, session: EngineSession, devices: tuple[EngineDevice, ...], reason: str
    ) -> None:
        """Announce that a gang is likely to be resized to these devices; idempotent."""
        assert session.gang is not None
        if session.gang.prepared != devices:
            session.gang.prepared = devices
            self.append(PrepareResize(session.id, tuple(each.id for each in devices), reason))

    def _stop(
        self, session: EngineSession, reason: str, now: float, nadir: float, resize: int
    ) -> None:
        if session.phase is Phase.LOADING:
            session.lease.run_since = now
        session.phase = Phase.STOPPING
        self.append(Preempt(session.id, session.lease.token, reason, nadir, resize))
