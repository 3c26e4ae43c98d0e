"""The engine: one event in, decisions out.

Each event is handled in the same way: record what has changed, review the timers that are due, and
then serve waiting sessions in order until none can be served any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler import persistence as past
from jupyter_sing.scheduler.decisions import Decision, Guarantees, Promised, Queued
from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.explain.explain import ExplainedWait, Explainer
from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger
from jupyter_sing.scheduler.fairness.tier_targets import Admission, Tally, admit
from jupyter_sing.scheduler.ids import SessionId
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.queue.cell_lifecycle import CellLifecycle
from jupyter_sing.scheduler.queue.dispatcher import Dispatcher
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.packing import Packing
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, Tier
from jupyter_sing.scheduler.state import EngineSession, Phase
from jupyter_sing.scheduler.statistics import Statistics

ANNOUNCED = (events.CellSubmitted, events.Released, events.WorkerDied, events.GrantRefused)
"""Events after which a session may have to wait, which is announced to its user."""


class Engine:
    """Scheduler that decides which session executes on which device.

    Parameters
    ----------
    devices
        All devices. Their switching times are used until `BandwidthMeasured`.
    settings
        The policy's numbers.
    guarantees
        Who may hold what; without it, every device is open to all.
    accounts
        What an earlier engine has returned from `accounts`: this one continues from there.
    now
        The present time, on the clock of the events.

    Raises
    ------
    AccountsError
        The accounts cannot be read; the message says why.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        settings: EngineSettings | None = None,
        guarantees: Guarantees | None = None,
        accounts: object = None,
        now: float = 0.0,
    ) -> None:
        self._settings = settings or EngineSettings()
        self._ledger = ServiceLedger(len(devices))
        self._agenda = Timers(
            self._settings,
            self._ledger,
            lambda vc, gpus: self._leases.entitlements.below(vc, gpus),
            lambda session, now: self._cells.time_is_up(session, now),
        )
        self._limiter = self._agenda.limiter
        self._waiting = self._agenda.waiting
        self._running = self._agenda.running
        self._leases = LeaseTable(
            devices,
            self._settings,
            guarantees or NoGuarantees([device.id for device in devices]),
            self._ledger,
            self._limiter,
            lambda session, now: self._cells.wait_again(session, now),
            self._agenda.quantum_of,
        )
        self._sessions = self._leases.sessions
        self._packing = Packing(self._may_share)
        self._serving = Dispatcher(
            self._agenda, self._ledger, self._leases, self._packing, guarantees is not None
        )
        self._explaining = Explainer(self._agenda, self._leases, self._serving)
        self._cells = CellLifecycle(
            self._ledger,
            self._agenda,
            self._leases,
            self._serving,
            self._packing,
            self._explaining,
        )
        self._order = 0
        self._tally = Tally()
        self._unpromised: dict[EngineSession, None] = {}
        self._past: dict[str, past.SessionHistory] = {}
        if accounts is not None:
            self._restore(accounts, now)
        self._tiers: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._handlers: dict[type, Callable[..., None]] = {
            events.SessionAdded: self._opened,
            events.SessionRemoved: self._closed,
            events.TermsChanged: self._changed,
            events.CellSubmitted: self._cells.submitted,
            events.CellFinished: self._cells.finished,
            events.Started: self._cells.started,
            events.Released: self._cells.released,
            events.Evicted: self._cells.evicted,
            events.Moved: self._cells.moved,
            events.GrantRefused: self._cells.refused,
            events.Stayed: self._cells.stayed,
            events.WorkerDied: self._cells.worker_died,
            events.DeviceFailed: self._cells.device_failed,
            events.DeviceHealed: self._cells.device_healed,
            events.Measured: self._measured,
            events.BandwidthMeasured: self._bandwidth,
            events.Reconfigured: self._reconfigured,
            events.Tick: self._ticked,
        }

    # Public interface.

    def handle(self, event: Event, *others: Event) -> list[Decision]:
        """Handle an event, or several before any waiting session is served; return the decisions.

        `at` of an event must not be before that of the previous one.
        """
        now = event.at
        for each in (event, *others):
            now = each.at
            self._handlers[type(each)](each)
        self._agenda.due(now)
        self._serving.serve(now)
        for each in (event, *others):
            if isinstance(each, ANNOUNCED):
                self._announce(each.session, now)
        return self._leases.issued.take()

    def outlooks(self, now: float) -> dict[SessionId, ExplainedWait]:
        """Return for each waiting session its position, its expected wait, and why it waits.

        This takes time in proportion to the number of sessions, and changes nothing.
        """
        return self._explaining.outlooks(now)

    def explain(self, session: SessionId, now: float) -> ExplainedWait | None:
        """Return the outlook of one session; None if it does not wait."""
        return self.outlooks(now).get(session)

    def tags(self, session: str, now: float) -> tuple[float, ...]:
        """Return the tags of a session's virtual cluster, of its user, and of the session itself.

        Sessions that all ask for a device at once, as after a restart, must do so in the order of
        their tags: the first one sets the virtual time, and service missed before that is not owed
        to any.
        """
        known = self._sessions.get(session)
        found: list[float] = []
        flow = known.flow if known else None
        while flow:
            found.append(flow.at(now))
            flow = flow.parent
        return tuple(reversed(found))

    def accounts(self, now: float) -> past.Document:
        """Export the service that all have had, for the next engine (`persistence.py`)."""
        return past.export(
            token=self._leases.issued.token,
            turn=self._explaining.turn,
            violations=self._tally.missed,
            ledger=self._ledger,
            sessions=self._sessions.values(),
            past=self._past.values(),
            devices=self._leases.table.devices.values(),
            now=now,
        )

    def next_tick(self) -> float | None:
        """Return when the engine needs a `Tick` if no event comes before; None: not at all."""
        return self._agenda.next()

    def statistics(self) -> Statistics:
        """Return the counters."""
        return Statistics(
            self._leases.issued.preemptions,
            self._leases.issued.switches,
            self._leases.issued.evictions,
            self._leases.issued.migrations,
            self._tally.missed,
            {
                (flow.parent.name, flow.name): flow.served
                for flow in self._ledger.flows()
                if flow.parent
            },
        )

    def devices(self) -> list[DeviceSpec]:
        """Return the devices, with the current estimates of their switching times."""
        return [
            DeviceSpec(
                d.id,
                d.memory,
                d.node,
                bytes_per_second=d.bytes_per_second,
                constant_seconds=d.constant_seconds,
            )
            for d in self._leases.table.devices.values()
        ]

    def held(self) -> dict[str, tuple[str, int]]:
        """Return the device and the token of every lease, by session."""
        return self._leases.held()

    def contended(self, session: str) -> bool:
        """True if any session waits that might use what this session holds."""
        return session in self._sessions and len(self._waiting) > 0

    def admission(self, session: str) -> Admission:
        """Return whether the tier target of a session can be kept, and the reason."""
        return self._sessions[session].terms.admission

    def _restore(self, accounts: object, now: float) -> None:
        found = past.restore(
            accounts, self._ledger, self._leases.table.devices, self._settings, now
        )
        self._leases.issued.token = found.token
        self._explaining.turn = found.turn
        self._tally.missed = found.violations
        self._past = found.sessions
        for flow in self._ledger.flows():
            self._limiter.apply(flow, now)

    # Sessions.

    def _opened(self, event: events.SessionAdded) -> None:
        if event.session in self._sessions:
            return
        user = self._user(event.vc, event.user, event.at)
        self._order += 1
        flow = self._ledger.session(event.session, user, event.weight)
        session = EngineSession(event, self._order, flow)
        session.account.tally = self._tally
        self._sessions[event.session] = session
        shapes = self._serving.placement.shapes
        shapes[session.gpus] = shapes.get(session.gpus, 0) + 1
        self._pin(session, event.pinned, event.device)
        self._promise(session, event.at)
        known = self._past.pop(event.session, None)
        if known is not None:
            known.apply(session, event.at)
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
        settings = self._settings
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

    def _promise(self, session: EngineSession, now: float) -> None:
        """Admit a session to its tier, if the tier target can be kept."""
        before, found = session.terms.admission, self._admit(session)
        session.terms.admission = found
        session.terms.goal = (
            self._settings.targets.get(session.terms.tier, 0.0) if found.kept else 0.0
        )
        session.account.promise(session.terms.goal, now)
        if found.kept:
            self._count_promise(session, 1)
            self._unpromised.pop(session, None)
        else:
            self._unpromised[session] = None
        if found.kept != before.kept or (not found.kept and found.tier is not before.tier):
            self._leases.issued.append(Promised(session.id, found.kept, found.reason))

    def _withdraw_promise(self, session: EngineSession) -> None:
        """Withdraw the tier target of a session; `_promise_again` may then admit others."""
        if session.terms.admission.kept:
            self._count_promise(session, -1)
        self._unpromised.pop(session, None)

    def _promise_again(self, now: float) -> None:
        """Retry to admit sessions that could not be admitted, in their order."""
        for session in sorted(self._unpromised, key=lambda each: each.number):
            self._promise(session, now)

    def _count_promise(self, session: EngineSession, times: int) -> None:
        """Add what a session is expected to keep busy, or, with -1, subtract it."""
        self._tiers[session.terms.tier] += times * session.gpus * self._settings.duty

    def _pin(self, session: EngineSession, pinned: bool, device: str | None) -> None:
        """Pin a session to the device that it holds or is on, or unpin it."""
        if session.terms.pinned and not pinned:
            for home in session.residency.homes:
                self._leases.table.refusals.relent(home)
        session.terms.pinned = pinned
        if not pinned or session.gpus > 1:
            session.residency.pinned_on = None
        elif session.residency.pinned_on is None:
            here = [*session.lease.devices, *session.residency.homes][:1]
            session.residency.pinned_on = self._leases.table.devices.get(
                device or "", here[0] if here else None
            )

    def _admit(self, session: EngineSession) -> Admission:
        healthy = sum(device.healthy for device in self._leases.table.devices.values())
        return admit(
            session.terms.tier, session.gpus, self._tiers, healthy, healthy, self._settings.targets
        )

    def _closed(self, event: events.SessionRemoved) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        self._cells.stop(session, event.at)
        if session.phase is not Phase.IDLE:
            self._cells.rest(session, event.at)
        self._leases.table.forget(session, event.at)
        self._leases.table.refusals.forget(session)
        self._packing.forget(session)
        self._serving.placement.shapes[session.gpus] -= 1
        self._withdraw_promise(session)
        self._promise_again(event.at)
        session.timers += 1
        del self._sessions[event.session]

    def _changed(self, event: events.TermsChanged) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        now = event.at
        if event.tier is not session.terms.tier:
            self._withdraw_promise(session)
            session.terms.tier = event.tier
            self._promise(session, now)
            self._promise_again(now)
        self._pin(session, event.pinned, event.device)
        session.terms.may_pack = event.may_pack
        self._move(session, event.vc, event.user, now)
        self._ledger.reweigh(session.flow, event.weight, now)
        self._packing.offer(session)
        self._agenda.review(session, now)

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
            self._serving.withdraw(session)
        quotas = session.quotas
        self._ledger.move(session.flow, user, now)
        session.vc, session.quotas = vc or session.vc, session.flow.quotas
        for quota, other in zip(quotas, session.quotas, strict=True):
            if quota is not other:
                quota.transfer(session, other)
        if waits:
            self._serving.let_wait(session, now)

    # Measurements and settings.

    def _measured(self, event: events.Measured) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        self._leases.table.resize(session, event.memory)
        session.usage.step_seconds = event.step_seconds
        session.usage.nadir = event.nadir
        if event.at > session.usage.measured_at:
            session.usage.utilisation = min(
                1.0, event.seconds_used / (event.at - session.usage.measured_at)
            )
        session.usage.measured_at = event.at
        pack = self._packing.packs.get(session)
        if pack is not None:
            tried = not pack.kept
            total = self._packing.measured(session)
            if total is not None and pack.kept and tried:
                self._leases.keep(pack.host, pack.guest, total)
            elif total is not None and not pack.kept:
                self._packing.part(pack, event.at, failed=True)
                self._running.remove(pack.guest)
                self._leases.part(pack.guest, total, event.at)
        elif session.phase is Phase.RUNNING and event.step_seconds:
            session.usage.rate_alone = 1.0 / event.step_seconds
            self._packing.offer(session)

    def _bandwidth(self, event: events.BandwidthMeasured) -> None:
        device = self._leases.table.devices.get(event.device)
        if device is not None and event.bytes_per_second > 0.0:
            device.bytes_per_second = event.bytes_per_second
            device.constant_seconds = max(0.0, event.constant_seconds)

    def _reconfigured(self, event: events.Reconfigured) -> None:
        settings, now = event.settings, event.at
        self._settings = settings
        self._agenda.configure(settings)
        self._leases.configure(settings)
        for flow in self._ledger.flows():
            if flow.parent is None:
                weight = settings.vc_weights.get(flow.name, 1.0)
            else:
                weight = settings.user_weights.get((flow.parent.name, flow.name), 1.0)
            self._ledger.reweigh(flow, weight, now)
            self._limiter.apply(flow, now)
        self._tiers, self._unpromised = dict.fromkeys(Tier, 0.0), {}
        for session in self._sessions.values():
            self._promise(session, now)
        if event.guarantees is not None:
            self._leases.govern(event.guarantees, now)
            self._serving.begin_again(not isinstance(event.guarantees, NoGuarantees), now)
        self._running.put_all(now)
        for session in self._sessions.values():
            self._agenda.review(session, now)

    def _ticked(self, event: events.Tick) -> None:
        """Do nothing: only time has passed."""

    # Limits.

    def _may_share(self, session: EngineSession, now: float) -> bool:
        return (
            not self._limiter.holds_back(session, now) and self._limiter.leaving(session, now) == []
        )

    def _announce(self, name: str, now: float) -> None:
        """Announce that a session has to wait."""
        session = self._sessions.get(name)
        if session is not None and session.phase is Phase.WAITING:
            self._leases.issued.append(Queued(name, self._explaining.why(session, now)))
