"""Carries out the engine's decisions: the agent acts, and the log says why."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from jupyter_sing.controller.decision_log import DecisionEntry, DecisionLog
from jupyter_sing.controller.session_entry import SessionEntry
from jupyter_sing.scheduler.decisions import (
    Decision,
    Evict,
    Grant,
    GuaranteeChanged,
    MigrateMemory,
    Pack,
    Preempt,
    Queued,
    Unpack,
)
from kernelproxy.common.readable import device_name, devices_named
from kernelproxy.common.scheduler_api import Actions, SessionOutlook

_ID = re.compile(r"\b[0-9a-f]{12}\b")


class DecisionRunner:
    """Carries out decisions and logs them.

    Parameters
    ----------
    sessions : mapping of str to SessionEntry
        All sessions, by id.
    log : DecisionLog
    outlook : callable
        Returns the outlook of a session that waits.
    on_guarantee : callable
        Called with a session of which the tier target is kept from now on, or is not.
    leader_of : callable
        Returns the rank that stands for a job, by the job's name in the engine.
    """

    actions: Actions

    def __init__(
        self,
        sessions: Mapping[str, SessionEntry],
        log: DecisionLog,
        outlook: Callable[[str], SessionOutlook | None],
        on_guarantee: Callable[[SessionEntry], None],
        leader_of: Callable[[str], SessionEntry | None],
    ) -> None:
        self._sessions, self._log = sessions, log
        self.outlook, self._on_guarantee = outlook, on_guarantee
        self._leader_of = leader_of

    def carry_out(self, decision: Decision) -> None:
        """Have the agent act on a decision, and log it."""
        if isinstance(decision, Pack | Unpack):
            self._note_company(decision)
            return
        if isinstance(decision, GuaranteeChanged):
            self.note_guarantee(decision.session, decision)
            return
        why = self.named(decision.reason, decision.session)
        match decision:
            case Grant(session, devices, token, quantum):
                if known := self._sessions.get(session):
                    known.token, known.granted = token, devices[0]
                why = f"It may use {device_name(devices[0])} for {quantum:g} s: {why}."
                self.actions.grant(session, devices[0], token)
            case Preempt(session, token, _, within):
                why = f"Its turn ends: {why}."
                self.actions.preempt(session, token, within)
            case Evict(session, device, to):
                self.actions.evict(session, device, f"{why[:1].upper()}{why[1:]}")
                where = "host memory" if to == "host" else to
                why = f"Its memory goes from {device_name(device)} to {where}: {why}."
            case MigrateMemory(session, source, target):
                why = f"It moves from {device_name(source)} to {device_name(target)}: {why}."
                self.actions.migrate(session, source, target)
            case Queued(session):
                outlook = self.outlook(session)
                if outlook is None:
                    return  # it no longer waits
                why = outlook.reason
                self.actions.explain(session, why)
        self.note(session, decision.kind, why)

    def note(self, session: str, kind: str, why: str) -> None:
        """Log a decision about a session."""
        self._log.note(DecisionEntry(time.time(), session, self._name(session), kind, why))

    def _note_company(self, decision: Pack | Unpack) -> None:
        """Log that sessions share a device, or no longer do: once for each of them."""
        kind = decision.kind
        for session in decision.sessions:
            why = self.named(decision.reason, session)
            others = [self.named(each, session) for each in decision.sessions if each != session]
            beside = f"{device_name(decision.device)} with {' and '.join(others)}"
            does = "It shares" if isinstance(decision, Pack) else "It no longer shares"
            self.note(session, kind, f"{does} {beside}: {why}.")

    def note_guarantee(self, session: str, decision: GuaranteeChanged) -> None:
        """Tell a session whether the target of its tier is kept."""
        if known := self._sessions.get(session):
            known.shortfall = "" if decision.kept else decision.reason.partition(": ")[2]
            if known.sent:  # else it is about to be
                self._on_guarantee(known)

    def _entry(self, name: str) -> SessionEntry | None:
        """Return the session of that id, or the one that stands for the job of that id."""
        return self._sessions.get(name) or self._leader_of(name)

    def _name(self, session: str) -> str:
        known = self._entry(session)
        return session if known is None else known.terms.name

    def named(self, reason: str, session: str) -> str:
        """Replace ids by names, and remove a full stop at the end.

        Of another user's session, the reader sees only the name of that user.
        """
        reader = self._entry(session)

        def name(found: re.Match[str]) -> str:
            other = self._entry(found[0])
            if other is None or reader is None or other.terms.user == reader.terms.user:
                return self._name(found[0])
            return other.terms.user

        return devices_named(_ID.sub(name, reason)).rstrip(". ")
