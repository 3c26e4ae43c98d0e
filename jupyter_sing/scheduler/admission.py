"""Admission of sessions to their tiers: which targets are promised, as far as they can be kept."""

from __future__ import annotations

from jupyter_sing.scheduler.decisions import GuaranteeChanged
from jupyter_sing.scheduler.fairness.tier_targets import Admission, Tally, admit
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from jupyter_sing.scheduler.state import EngineSession


class TierAdmission:
    """Admits sessions to their tiers while all admitted ones can have their targets.

    Attributes
    ----------
    tally
        Counts the targets that were missed.
    """

    def __init__(self, leases: LeaseTable, settings: EngineSettings) -> None:
        self._leases = leases
        self._settings = settings
        self.tally = Tally()
        self._tiers: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._refused: dict[EngineSession, None] = {}

    def configure(self, settings: EngineSettings, now: float) -> None:
        """Use other settings from now on, and admit all sessions again."""
        self._settings = settings
        self._tiers, self._refused = dict.fromkeys(Tier, 0.0), {}
        for session in self._leases.sessions.values():
            self.admit(session, now)

    def admit(self, session: EngineSession, now: float) -> None:
        """Admit a session to its tier, if the tier target can be kept."""
        before, found = session.terms.admission, self._found(session)
        session.terms.admission = found
        session.terms.goal = (
            self._settings.targets.get(session.terms.tier, 0.0) if found.kept else 0.0
        )
        session.account.set_goal(session.terms.goal, now)
        if found.kept:
            self._count(session, 1)
            self._refused.pop(session, None)
        else:
            self._refused[session] = None
        if found.kept != before.kept or (not found.kept and found.tier is not before.tier):
            self._leases.issued.append(GuaranteeChanged(session.id, found.kept, found.reason))

    def withdraw(self, session: EngineSession) -> None:
        """Withdraw the tier target of a session; `retry` may then admit others."""
        if session.terms.admission.kept:
            self._count(session, -1)
        self._refused.pop(session, None)

    def retry(self, now: float) -> None:
        """Retry to admit sessions that could not be admitted, in their order."""
        for session in sorted(self._refused, key=lambda each: each.number):
            self.admit(session, now)

    def _count(self, session: EngineSession, times: int) -> None:
        """Add what a session is expected to keep busy, or, with -1, subtract it."""
        self._tiers[session.terms.tier] += times * session.shape * self._settings.duty

    def _found(self, session: EngineSession) -> Admission:
        healthy = sum(device.healthy for device in self._leases.table.devices.values())
        return admit(
            session.terms.tier, session.shape, self._tiers, healthy, healthy, self._settings.targets
        )
