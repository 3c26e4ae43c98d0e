"""Sessions of the engine: they are added and removed, and their terms change."""

from __future__ import annotations

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.admission import TierAdmission
from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger
from jupyter_sing.scheduler.persistence import SessionHistory
from jupyter_sing.scheduler.queue.cell_lifecycle import CellLifecycle
from jupyter_sing.scheduler.queue.dispatcher import Dispatcher
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.packing import Packing
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.state import EngineSession, Phase


class SessionRegistry:
    """Adds, removes and changes sessions, event by event.

    Attributes
    ----------
    history
        Of sessions that an earlier engine knew and that are not here yet.
    """

    def __init__(
        self,
        ledger: ServiceLedger,
        timers: Timers,
        leases: LeaseTable,
        dispatcher: Dispatcher,
        packing: Packing,
        cells: CellLifecycle,
        admission: TierAdmission,
    ) -> None:
        self._ledger = ledger
        self._timers = timers
        self._limiter = timers.limiter
        self._leases = leases
        self._sessions = leases.sessions
        self._dispatcher = dispatcher
        self._packing = packing
        self._cells = cells
        self._admission = admission
        self._order = 0
        self.history: dict[str, SessionHistory] = {}

    def added(self, event: events.SessionAdded) -> None:
        if event.session in self._sessions:
            return
        user = self._user(event.vc, event.user, event.at)
        self._order += 1
        flow = self._ledger.session(event.session, user, event.weight)
        session = EngineSession(event, self._order, flow)
        session.account.tally = self._admission.tally
        self._sessions[event.session] = session
        shapes = self._dispatcher.placement.gangs.shapes
        shapes[session.shape] = shapes.get(session.shape, 0) + 1
        self._pin(session, event.pinned, event.device)
        self._admission.admit(session, event.at)
        known = self.history.pop(event.session, None)
        if known is not None:
            known.apply(session, event.at)
        if session.gang is not None:
            return
        if event.bound is not None and event.gpus == 1:
            session.residency.bound = self._leases.table.devices[event.bound]
        if event.device is not None and event.resident and event.gpus == 1 and event.memory:
            home = self._leases.table.devices[event.device]
            if home.healthy and home.used + event.memory <= home.memory:
                home.put(session, event.memory)
                session.residency.homes = [home]
                self._leases.table.free.update(home)

    def _user(self, vc: str, user: str, now: float) -> Flow:
        """Return the flow of a user, with the weights and limits of the settings."""
        settings = self._timers.settings
        flow = self._ledger.user(
            vc,
            user,
            settings.vc_weights.get(vc, 1.0),
            settings.user_weights.get((vc, user), 1.0),
        )
        if not flow.backlog:
            assert flow.parent
            self._limiter.apply(flow, now)
            self._limiter.apply(flow.parent, now)
        return flow

    def _pin(self, session: EngineSession, pinned: bool, device: str | None) -> None:
        """Pin a session to the device that it holds or is on, or unpin it."""
        if session.terms.pinned and not pinned:
            for home in session.residency.homes:
                self._leases.table.refusals.relent(home)
        session.terms.pinned = pinned and session.gang is None
        if not pinned or session.gang is not None or session.gpus > 1:
            session.residency.pinned_on = None
        elif session.residency.pinned_on is None:
            here = [*session.lease.devices, *session.residency.homes][:1]
            session.residency.pinned_on = self._leases.table.devices.get(
                device or "", here[0] if here else None
            )

    def removed(self, event: events.SessionRemoved) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        self._cells.stop(session, event.at)
        if session.phase is not Phase.IDLE:
            self._cells.rest(session, event.at)
        self._leases.table.forget(session, event.at)
        self._leases.table.refusals.forget(session)
        self._packing.forget(session)
        self._dispatcher.placement.gangs.shapes[session.shape] -= 1
        self._admission.withdraw(session)
        self._admission.retry(event.at)
        session.timers += 1
        del self._sessions[event.session]

    def changed(self, event: events.TermsChanged) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        now = event.at
        if event.tier is not session.terms.tier:
            self._admission.withdraw(session)
            session.terms.tier = event.tier
            self._admission.admit(session, now)
            self._admission.retry(now)
        self._pin(session, event.pinned, event.device)
        session.terms.may_pack = event.may_pack
        self._move(session, event.vc, event.user, now)
        self._ledger.reweigh(session.flow, event.weight, now)
        self._packing.offer(session)
        self._timers.review(session, now)

    def _move(self, session: EngineSession, vc: str | None, name: str | None, now: float) -> None:
        """Move a session to another virtual cluster or user, with all that it has."""
        before = session.flow.parent
        assert before
        user = self._user(vc or session.vc, name or before.name, now)
        if user is before:
            return
        if session.phase is Phase.RESERVED:
            self._cells.lose(session, now)  # its reservation belongs to its virtual cluster
        waits = session.phase is Phase.WAITING
        if waits:
            self._dispatcher.withdraw(session)
        quotas = session.quotas
        self._ledger.move(session.flow, user, now)
        session.vc, session.quotas = vc or session.vc, session.flow.quotas
        for quota, other in zip(quotas, session.quotas, strict=True):
            if quota is not other:
                quota.transfer(session, other)
        if waits:
            self._dispatcher.let_wait(session, now)
