"""Calls of the agent about the lease and the memory of one session.

They become events for the engine. Those of a rank of a gang go to `jobs.gang_leases` instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jupyter_sing.controller.decision_runner import DecisionRunner
from jupyter_sing.controller.engine_driver import EngineDriver
from jupyter_sing.controller.jobs.gang_leases import GangLeases
from jupyter_sing.controller.jobs.jobs import Jobs
from jupyter_sing.controller.session_entry import SessionEntry
from jupyter_sing.controller.time_to_gpu import TimeToGpu
from jupyter_sing.scheduler import events

log = logging.getLogger(__name__)


class LeaseCalls:
    """The part of a controller that concerns the lease of one session."""

    _clock: Callable[[], float]
    _driver: EngineDriver
    _gangs: GangLeases
    _jobs: Jobs
    _runner: DecisionRunner
    _sessions: dict[str, SessionEntry]
    _waits: TimeToGpu

    def wants(self, session: str) -> None:
        """See `Arbiter`."""
        if job := self._jobs.of(session):
            self._gangs.wants(job, session)
            return
        if known := self._sessions.get(session):
            known.wants = True
        self._waits.begin(session, self._clock())
        self._driver.send(events.CellSubmitted(self._clock(), session))

    def done(self, session: str) -> None:
        """See `Arbiter`."""
        if job := self._jobs.of(session):
            self._gangs.ended(job, session, None, wants=False)
            return
        self._waits.forget(session)
        self._note_end(session)
        if known := self._sessions.get(session):
            known.wants = False
        self._driver.send(events.CellFinished(self._clock(), session))

    def started(self, session: str, token: int) -> None:
        """See `Arbiter`."""
        if job := self._jobs.of(session):
            self._gangs.started(job, session, token)
            return
        if known := self._sessions.get(session):
            known.device, known.resident = known.granted or known.device, True
            self._waits.end(session, known.standing.tier, self._clock())
        self._driver.send(events.Started(self._clock(), session, token))

    def released(self, session: str, token: int) -> None:
        """See `Arbiter`."""
        if job := self._jobs.of(session):
            self._gangs.released(job, session, token)
            return
        known = self._sessions.get(session)
        if known is not None and known.token == token:
            known.device, known.resident, known.token = known.granted, True, None
        self._driver.send(events.Released(self._clock(), session, token))

    def lost(self, session: str, why: str = "") -> None:
        """See `Arbiter`."""
        known = self._sessions.get(session)
        if known is not None:
            known.resident = False
        if why:
            self._runner.note(session, "lost", why)
        if job := self._jobs.of(session):
            self._gangs.ended(job, session, None, wants=True)
            return
        self._note_end(session)
        if known is not None:
            known.wants = True
        # It may have been idle; it then needs a lease so that its state can be restored.
        self._driver.send(events.WorkerDied(self._clock(), session))
        self._driver.send(events.CellSubmitted(self._clock(), session))

    def moved(self, session: str, device: str, *, resident: bool) -> None:
        """See `Arbiter`."""
        if job := self._jobs.of(session):
            self._gangs.moved(job, session, device, resident=resident)
            return
        if known := self._sessions.get(session):
            known.device, known.resident = device, resident
            if device != known.granted:
                known.token = None
        self._driver.send(events.Moved(self._clock(), session, device, resident))

    def evicted(self, session: str, device: str) -> None:
        """See `Arbiter`."""
        if job := self._jobs.of(session):
            self._gangs.evicted(job, session, device)
            return
        if known := self._sessions.get(session):
            known.resident = False
        self._driver.send(events.Evicted(self._clock(), session, device))

    def refused(self, session: str, token: int, why: str) -> None:
        """See `Arbiter`."""
        log.warning("Session %s could not use its turn: %s", session, why)
        if job := self._jobs.of(session):
            self._gangs.refused(job, session, token, why)
            return
        known = self._sessions.get(session)
        if known is not None and known.token == token:  # it may have a later lease already
            known.token = None
        self._driver.send(events.GrantRefused(self._clock(), session, token, why))

    def stayed(self, session: str, device: str, why: str) -> None:
        """See `Arbiter`."""
        log.warning("Session %s could not leave %s: %s", session, device, why)
        if job := self._jobs.of(session):
            self._gangs.stayed(job, session, device, why)
            return
        self._driver.send(events.Stayed(self._clock(), session, device, why))

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        """See `Arbiter`."""
        if known := self._sessions.get(session):
            known.memory = memory
        if job := self._jobs.of(session):
            self._gangs.measured(job, seconds, step_seconds)
            return
        self._driver.send(
            events.Measured(self._clock(), session, memory, seconds, step_seconds, nadir)
        )

    def _note_end(self, session: str) -> None:
        """Record that a session no longer has a lease."""
        if known := self._sessions.get(session):
            known.token = None
