"""The life of a cell: it requests devices, gets and loses leases, and finishes.

Answers to decisions are handled here. An answer about another lease than the present one changes
nothing.
"""

from __future__ import annotations

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.explain.explain import Explainer
from jupyter_sing.scheduler.fairness.fair_queue import ServiceLedger
from jupyter_sing.scheduler.fairness.mlfq import level_of, run_min
from jupyter_sing.scheduler.queue.dispatcher import Dispatcher
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.packing import Packing
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from jupyter_sing.scheduler.state import HOLDING, EngineDevice, EngineSession, Phase


class CellLifecycle:
    """State changes of cells, event by event."""

    def __init__(
        self,
        ledger: ServiceLedger,
        timers: Timers,
        leases: LeaseTable,
        dispatcher: Dispatcher,
        packing: Packing,
        explaining: Explainer,
    ) -> None:
        self._ledger = ledger
        self._timers = timers
        self._running = timers.running
        self._limiter = timers.limiter
        self._leases = leases
        self._sessions = leases.sessions
        self._dispatcher = dispatcher
        self._packing = packing
        self._explaining = explaining
        self._order = 0

    @property
    def _settings(self) -> EngineSettings:
        return self._timers.settings

    def submitted(self, event: events.CellSubmitted) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.phase is not Phase.IDLE:
            return
        now = event.at
        session.gaps.used(now)
        if not session.wait.resumes:
            session.attained = session.wait.waited = 0.0
        self._ledger.activate(session.flow, now)
        self.wait_again(session, now)
        session.wait.resumes, session.wait.waited = False, 0.0

    def wait_again(self, session: EngineSession, now: float) -> None:
        """Let a session wait."""
        self._dispatcher.yielded[session] = None
        self._order += 1
        session.wait.arrival = self._order
        session.phase = Phase.WAITING
        if session.gang is not None:
            session.size_to(session.gang.sizes(self._leases.table.largest)[0])
        session.wait.since = now - (session.wait.waited if session.wait.resumes else 0.0)
        session.wait.boost = 0
        session.account.wait(now)
        session.wait.urgent = self._timers.is_urgent(session, now)
        self._dispatcher.let_wait(session, now)
        self._packing.offer(session)
        self._timers.set_timer(session, self._timers.next_review(session, now))

    def finished(self, event: events.CellFinished) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.phase is Phase.IDLE:
            return
        now = event.at
        self.stop(session, now)
        self.rest(session, now)

    def rest(self, session: EngineSession, now: float) -> None:
        """Record that a session without a lease has no cell."""
        session.phase = Phase.IDLE
        session.timers += 1
        session.gaps.idle(now)
        session.account.rest(now)
        self._ledger.deactivate(session.flow, now)

    def stop(self, session: EngineSession, now: float, *, turned_back: bool = False) -> None:
        """End whatever a session holds or waits for; the caller sets its phase.

        `turned_back`: its memory has not come to the devices of its lease.
        """
        self._dispatcher.withdraw(session)
        self._running.remove(session)
        self._packing.withdraw(session)
        if session.gang is not None:
            session.gang.resize, session.gang.given, session.gang.prepared = 0, (), ()
        pack = self._packing.packs.get(session)
        if pack is not None:
            self._packing.part(pack, now, failed=False)
        if session.phase in HOLDING:
            self._explaining.ended(now - session.lease.granted_at)
            before, session.attained = session.attained, session.attained_at(now)
            self._note_burst(session, before, now)
            session.residency.clean_at = now + max(
                (device.transfer(session.memory) for device in session.lease.devices), default=0.0
            )
            if not turned_back:
                self._leases.table.arrived(session)
            self._locate(session, (), now)
        if session.phase in HOLDING or session.phase is Phase.RESERVED:
            self._leases.end(session, now)
        if pack is not None:
            self._packing.offer(pack.guest if session is pack.host else pack.host)

    def _note_burst(self, session: EngineSession, before: float, now: float) -> None:
        """Charge what a lease has attained at the interactive levels to the user's allowance."""
        edge = self._settings.levels[INTERACTIVE]
        seconds = min(edge, session.attained) - min(edge, before)
        if seconds > 0.0 and session.flow.parent:
            self._ledger.burst(session.flow.parent, seconds * session.gpus, now)

    def lose(self, session: EngineSession, now: float, *, turned_back: bool = False) -> None:
        """Let a session that held a lease or a reservation wait again."""
        if session.phase in HOLDING or session.phase is Phase.RESERVED:
            self.stop(session, now, turned_back=turned_back)
            self.wait_again(session, now)

    # Answers.

    def _current(self, name: str, token: int) -> EngineSession | None:
        session = self._sessions.get(name)
        if session is None or session.phase not in HOLDING or session.lease.token != token:
            return None
        return session

    def started(self, event: events.Started) -> None:
        session = self._current(event.session, event.token)
        if session is None or session.phase is Phase.RUNNING:
            return
        now = event.at
        self._arrived(session, now, resident=True)
        if session.phase is Phase.STOPPING:  # it is preempted already
            session.attained, session.lease.run_since = session.attained_at(now), now
            return
        session.phase = Phase.RUNNING
        session.lease.run_since = now
        loaded = session.lease.switch > 0.0 and session.memory > 0
        session.lease.switch = now - session.lease.granted_at
        session.account.execute(now)
        level = level_of(session.attained, self._settings)
        session.lease.level = level
        session.lease.protected_until = now + run_min(level, session.lease.switch, self._settings)
        session.lease.exposed_at = session.lease.protected_until
        overdrawn = any(device.budget.stretch(now) > 1.0 for device in session.lease.devices)
        if session.terms.tier is Tier.BASIC and not session.lease.aged and not overdrawn:
            cost = session.lease.switch if loaded else 0.0
            session.lease.exposed_at = now + run_min(level, cost, self._settings, floor=0.0)
        session.lease.quantum_end = now + self._timers.quantum_of(session, now)
        session.usage.measured_at = now
        self._packing.offer(session)
        self._timers.review(session, now)

    def released(self, event: events.Released) -> None:
        session = self._current(event.session, event.token)
        if session is None:
            return
        resize, given = 0, tuple[EngineDevice, ...]()
        if session.gang is not None:
            resize, given = session.gang.resize, session.gang.given
        self.lose(session, event.at)
        if resize:
            self._dispatcher.resume(session, resize, given, event.at)

    def evicted(self, event: events.Evicted) -> None:
        session = self._sessions.get(event.session)
        device = self._leases.table.devices.get(event.device)
        if session is None or device is None or device in session.lease.devices:
            return  # a lease there has begun since
        if session in device.residents:
            self._leases.table.left(session, device, event.at)

    def moved(self, event: events.Moved) -> None:
        session = self._sessions.get(event.session)
        device = self._leases.table.devices.get(event.device)
        if session is None or device is None:
            return
        if session.phase in HOLDING:
            if device in session.lease.devices:  # the move that its lease has requested
                self._arrived(session, event.at, resident=event.resident)
                return
            self.lose(session, event.at)
        self._leases.table.moved(session, device, event.at, resident=event.resident)

    def located(self, event: events.Located) -> None:
        session, known = self._sessions.get(event.session), self._leases.table.devices
        if session is not None and session.gang is not None:
            places = {known[name]: size for name, size in event.places if name in known and size}
            session.gang.places = places
            held = session.lease.devices
            self._leases.table.locate(session, places, held, event.at, left=True)

    def _locate(self, session: EngineSession, held: tuple[EngineDevice, ...], now: float) -> None:
        """Correct what was assumed of the memory of a gang by what was reported."""
        if session.gang is not None and session.gang.places is not None:
            self._leases.table.locate(session, session.gang.places, held, now, left=False)

    def _arrived(self, session: EngineSession, now: float, *, resident: bool) -> None:
        self._leases.table.arrived(session, resident=resident)
        self._locate(session, session.lease.devices, now)
        if resident:
            self._leases.table.refusals.forget(session)
        if session.residency.pinned_on is not None:
            (session.residency.pinned_on,) = session.lease.devices

    def refused(self, event: events.GrantRefused) -> None:
        session, now = self._current(event.session, event.token), event.at
        if session is not None:
            for device in session.lease.devices:
                self._timers.request_tick(self._leases.table.refusals.note(session, device, now))
            self._leases.table.turn_back(session, now)
            self.lose(session, now, turned_back=True)

    def stayed(self, event: events.Stayed) -> None:
        session = self._sessions.get(event.session)
        device = self._leases.table.devices.get(event.device)
        if session is not None and device is not None and device in session.residency.moving:
            self._leases.table.stayed(session, device, event.at)
            self._timers.request_tick(session.residency.stays_until)

    def worker_died(self, event: events.WorkerDied) -> None:
        session = self._sessions.get(event.session)
        if session is not None:
            self.lose(session, event.at)
            self._leases.table.forget(session, event.at)

    def device_failed(self, event: events.DeviceFailed) -> None:
        device = self._leases.table.devices.get(event.device)
        if device is None:
            return
        for session in self._leases.fail(device, event.at):
            if session.gang is not None:
                self._leave_failed(session, device, event.at)
                continue
            if session.phase in HOLDING and device not in session.lease.devices:
                # It is moving to another device, or has memory here that is not yet evicted.
                self._leases.table.left(session, device, event.at)
                continue
            self.lose(session, event.at)
            self._leases.table.forget(session, event.at)

    def _leave_failed(self, session: EngineSession, device: EngineDevice, now: float) -> None:
        """Stop a gang that executes on a device that failed: its ranks there wait for the others.

        What it has on other devices stays there, and they are free only when its ranks have
        stopped.
        """
        assert session.gang is not None
        if session in device.residents:
            self._leases.table.left(session, device, now)
        if session.gang.places is not None:
            session.gang.places.pop(device, None)
        if device in session.lease.devices:
            self._running.remove(session)
            session.gang.resize = 0
            if session.phase is not Phase.STOPPING:
                self._leases.issued.preempt(session, f"{device.id} has failed", now)

    def device_healed(self, event: events.DeviceHealed) -> None:
        device = self._leases.table.devices.get(event.device)
        if device is not None:
            self._leases.heal(device)

    def time_is_up(self, session: EngineSession, now: float) -> None:
        """End the lease of a session whose user or virtual cluster has used up its device time."""
        if session.phase is Phase.RUNNING:
            self._running.remove(session)
            self._packing.withdraw(session)
            held = self._limiter.reason(session, now)
            reason = held.text if held else "its device time is used up"
            self._leases.issued.preempt(session, reason, now)
