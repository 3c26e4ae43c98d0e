"""The engine: one event in, decisions out.

Each event is handled in the same way: record what has changed, review the timers that are due, and
then serve waiting sessions in order until none can be served any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler import persistence as past
from jupyter_sing.scheduler.admission import TierAdmission
from jupyter_sing.scheduler.decisions import Decision, Guarantees, Queued
from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.explain.explain import ExplainedWait, Explainer
from jupyter_sing.scheduler.fairness.fair_queue import ServiceLedger
from jupyter_sing.scheduler.fairness.tier_targets import Admission
from jupyter_sing.scheduler.gangs.job_text import size_text
from jupyter_sing.scheduler.ids import SessionId
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.queue.cell_lifecycle import CellLifecycle
from jupyter_sing.scheduler.queue.dispatcher import Dispatcher
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.packing import Packing
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.session_registry import SessionRegistry
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from jupyter_sing.scheduler.state import HOLDING, EngineSession, Phase
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
        self._timers = Timers(
            self._settings,
            self._ledger,
            lambda vc, gpus: self._leases.entitlements.below(vc, gpus),
            lambda session, now: self._cells.time_is_up(session, now),
        )
        self._limiter = self._timers.limiter
        self._waiting = self._timers.waiting
        self._running = self._timers.running
        self._leases = LeaseTable(
            devices,
            self._settings,
            guarantees or NoGuarantees([device.id for device in devices]),
            self._ledger,
            self._limiter,
            lambda session, now: self._cells.wait_again(session, now),
            self._timers.quantum_of,
        )
        self._sessions = self._leases.sessions
        self._packing = Packing(self._may_share)
        self._dispatcher = Dispatcher(
            self._timers, self._ledger, self._leases, self._packing, guarantees is not None
        )
        self._explaining = Explainer(self._timers, self._leases, self._dispatcher)
        self._cells = CellLifecycle(
            self._ledger,
            self._timers,
            self._leases,
            self._dispatcher,
            self._packing,
            self._explaining,
        )
        self._admission = TierAdmission(self._leases, self._settings)
        self._registry = SessionRegistry(
            self._ledger,
            self._timers,
            self._leases,
            self._dispatcher,
            self._packing,
            self._cells,
            self._admission,
        )
        if accounts is not None:
            self._restore(accounts, now)
        self._handlers = self._handlers_by_event()

    def _handlers_by_event(self) -> dict[type, Callable[..., None]]:
        return {
            events.SessionAdded: self._registry.added,
            events.SessionRemoved: self._registry.removed,
            events.TermsChanged: self._registry.changed,
            events.CellSubmitted: self._cells.submitted,
            events.CellFinished: self._cells.finished,
            events.Started: self._cells.started,
            events.Released: self._cells.released,
            events.Evicted: self._cells.evicted,
            events.Moved: self._cells.moved,
            events.Located: self._cells.located,
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
        self._timers.due(now)
        self._dispatcher.serve(now)
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

    def job_text(self, session: SessionId) -> str | None:
        """Return on how many devices a gang runs, and why, as a clause; None if it does not."""
        known = self._sessions.get(session)
        if known is None or known.gang is None or known.phase not in HOLDING:
            return None
        return size_text(known.gang, known.gpus, self._settings.grow_after)

    def new_token(self) -> int:
        """Return a token that is higher than any before, for a rank of a gang that has a lease."""
        self._leases.issued.token += 1
        return self._leases.issued.token

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
            violations=self._admission.tally.missed,
            ledger=self._ledger,
            sessions=self._sessions.values(),
            past=self._registry.history.values(),
            devices=self._leases.table.devices.values(),
            now=now,
        )

    def next_tick(self) -> float | None:
        """Return when the engine needs a `Tick` if no event comes before; None: not at all."""
        return self._timers.next()

    def statistics(self) -> Statistics:
        """Return the counters."""
        return Statistics(
            self._leases.issued.preemptions,
            self._leases.issued.switches,
            self._leases.issued.evictions,
            self._leases.issued.migrations,
            self._admission.tally.missed,
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
        self._admission.tally.missed = found.violations
        self._registry.history = found.sessions
        for flow in self._ledger.flows():
            self._limiter.apply(flow, now)

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
        self._timers.configure(settings)
        self._leases.configure(settings)
        for flow in self._ledger.flows():
            if flow.parent is None:
                weight = settings.vc_weights.get(flow.name, 1.0)
            else:
                weight = settings.user_weights.get((flow.parent.name, flow.name), 1.0)
            self._ledger.reweigh(flow, weight, now)
            self._limiter.apply(flow, now)
        self._admission.configure(settings, now)
        if event.guarantees is not None:
            self._leases.govern(event.guarantees, now)
            self._dispatcher.begin_again(not isinstance(event.guarantees, NoGuarantees), now)
        self._running.put_all(now)
        for session in self._sessions.values():
            self._timers.review(session, now)

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
