"""The engine: one event in, decisions out.

What it does with an event is always the same: note what has changed, look at what has become due,
and then serve waiting sessions in order until nobody can be served any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.agenda import Agenda
from jupyter_sing.scheduler.decisions import Decision, Guarantees, Queued
from jupyter_sing.scheduler.events import Event, Tier
from jupyter_sing.scheduler.fairness import Ledger
from jupyter_sing.scheduler.feedback import level_of, run_min
from jupyter_sing.scheduler.flat import Flat
from jupyter_sing.scheduler.leases import FAILURE_PAUSE, Leases
from jupyter_sing.scheduler.packing import UNDO, Packing
from jupyter_sing.scheduler.placement import Choice, Later, Placement
from jupyter_sing.scheduler.running import target
from jupyter_sing.scheduler.settings import Device, Settings
from jupyter_sing.scheduler.state import HOLDING, Phase, Session
from jupyter_sing.scheduler.statistics import Statistics
from jupyter_sing.scheduler.tiers import Admission, admit
from jupyter_sing.scheduler.waiting import INTERACTIVE, Blocked

COMPARISON_PAUSE = 10.0
"""Seconds after which service is compared again while somebody waits: tags pass each other then."""

GANGS_PAUSE = 0.2
"""Seconds between two searches for several devices at once that found none."""

YIELD_PAUSE = 0.05
"""Seconds for which a session that has lost its reservation leaves it to who took it: two of them
would take turns at reserving for ever."""

SKIPS_MAX = 32
"""Sessions that may be passed over in one round because waiting is better for them."""


ANNOUNCED = (events.CellSubmitted, events.Released, events.WorkerDied, events.Failed)
"""After these a session may have to wait, which people are told."""


class Engine:
    """Decides who executes where.

    Parameters
    ----------
    devices
        What there is. Switching times are believed until `BandwidthMeasured`.
    settings
        The policy's numbers.
    guarantees
        Who may hold what; without it, every device is for everybody.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        settings: Settings | None = None,
        guarantees: Guarantees | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._promised = guarantees is not None
        self._ledger = Ledger(len(devices))
        self._agenda = Agenda(
            self._settings, self._ledger, lambda vc, gpus: self._leases.below(vc, gpus)
        )
        self._waiting = self._agenda.waiting
        self._running = self._agenda.running
        self._leases = Leases(
            devices,
            self._settings,
            guarantees or Flat([device.id for device in devices]),
            self._ledger,
            self._wait_again,
            self._agenda.quantum_of,
        )
        self._sessions = self._leases.sessions
        self._placement = Placement(self._leases.nodes, self._leases.free, self._running)
        self._packing = Packing()
        self._order = 0
        self._violations = 0
        # Who has lost a reservation, or could not use it, since the last round began.
        self._yielded: dict[Session, None] = {}
        self._gangs_after = float("-inf")
        self._compared_after = float("-inf")
        self._turn = 1.0  # moving average of how long leases last
        self._tiers: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._handlers: dict[type, Callable[..., None]] = {
            events.SessionOpened: self._opened,
            events.SessionClosed: self._closed,
            events.TermsChanged: self._changed,
            events.CellSubmitted: self._submitted,
            events.CellFinished: self._finished,
            events.Started: self._started,
            events.Released: self._released,
            events.Evicted: self._evicted,
            events.Moved: self._moved,
            events.Failed: self._failed,
            events.WorkerDied: self._worker_died,
            events.DeviceFailed: self._device_failed,
            events.DeviceHealed: self._device_healed,
            events.Measured: self._measured,
            events.BandwidthMeasured: self._bandwidth,
            events.Reconfigured: self._reconfigured,
            events.Tick: self._ticked,
        }

    # What others call.

    def handle(self, event: Event) -> list[Decision]:
        """Take note of an event, and decide.

        `event.at` must not be before that of the event before.
        """
        now = event.at
        self._handlers[type(event)](event)
        self._agenda.due(now)
        self._serve(now)
        if isinstance(event, ANNOUNCED):
            self._announce(event.session, now)
        decided = self._leases.out
        self._leases.out = []
        return decided

    def next_tick(self) -> float | None:
        """When the engine wants a `Tick` if nothing happens before; None: not at all."""
        return self._agenda.next()

    def statistics(self) -> Statistics:
        """Return what has been counted so far."""
        return Statistics(
            self._leases.preemptions,
            self._leases.switches,
            self._leases.evictions,
            self._leases.migrations,
            self._violations,
            {
                (flow.parent.name, flow.name): flow.served
                for flow in self._ledger.flows()
                if flow.parent
            },
        )

    def devices(self) -> list[Device]:
        """Return the devices, with what switches to them are believed to take."""
        return [
            Device(
                d.id,
                d.memory,
                d.node,
                bytes_per_second=d.bytes_per_second,
                constant_seconds=d.constant_seconds,
            )
            for d in self._leases.devices.values()
        ]

    def contended(self, session: str) -> bool:
        """Whether anybody waits who might use what this session holds."""
        return session in self._sessions and len(self._waiting) > 0

    def admission(self, session: str) -> Admission:
        """Whether the tier of a session can be kept, in words."""
        known = self._sessions[session]
        return self._admit(known)

    # Sessions.

    def _opened(self, event: events.SessionOpened) -> None:
        if event.session in self._sessions:
            return
        settings = self._settings
        user = self._ledger.user(
            event.vc,
            event.user,
            settings.vc_weights.get(event.vc, 1.0),
            settings.user_weights.get((event.vc, event.user), 1.0),
        )
        self._order += 1
        flow = self._ledger.session(event.session, user, event.weight)
        session = Session(event, self._order, flow)
        self._sessions[event.session] = session
        shapes = self._placement.shapes
        shapes[session.gpus] = shapes.get(session.gpus, 0) + 1
        session.kept = self._admit(session).kept
        self._tiers[session.tier] += session.gpus * settings.duty
        if event.bound is not None and event.gpus == 1:
            session.bound = self._leases.devices[event.bound]
        if event.device is not None and event.gpus == 1 and event.memory:
            home = self._leases.devices[event.device]
            if home.healthy and home.used + event.memory <= home.memory:
                home.put(session, event.memory)
                session.homes = [home]
                self._leases.free.update(home)

    def _admit(self, session: Session) -> Admission:
        healthy = sum(device.healthy for device in self._leases.devices.values())
        return admit(session.tier, session.gpus, self._tiers, healthy, healthy)

    def _closed(self, event: events.SessionClosed) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        self._stop(session, event.at)
        if session.phase is not Phase.IDLE:
            self._rest(session, event.at)
        self._leases.forget(session, event.at)
        self._packing.forget(session)
        self._placement.shapes[session.gpus] -= 1
        self._tiers[session.tier] -= session.gpus * self._settings.duty
        session.timers += 1
        del self._sessions[event.session]

    def _changed(self, event: events.TermsChanged) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        self._tiers[session.tier] -= session.gpus * self._settings.duty
        session.tier = event.tier
        session.kept = self._admit(session).kept
        self._tiers[session.tier] += session.gpus * self._settings.duty
        session.pinned = event.pinned
        session.may_pack = event.may_pack
        self._packing.offer(session)
        self._ledger.reweigh(session.flow, event.weight, event.at)
        self._agenda.review(session, event.at)

    # Cells.

    def _submitted(self, event: events.CellSubmitted) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.phase is not Phase.IDLE:
            return
        now = event.at
        session.gaps.used(now)
        session.attained = 0.0
        self._ledger.activate(session.flow, now)
        self._wait_again(session, now)

    def _wait_again(self, session: Session, now: float) -> None:
        """Put a session among the waiting ones."""
        self._yielded[session] = None
        self._order += 1
        session.arrival = self._order
        session.phase = Phase.WAITING
        session.waiting_since = now
        session.boost = 0
        session.account.wait(now)
        session.urgent = self._agenda.is_urgent(session, now)
        self._waiting.add(session, self._agenda.level(session, now), now)
        self._packing.offer(session)
        self._agenda.set_timer(session, self._agenda.next_look(session, now))

    def _finished(self, event: events.CellFinished) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.phase is Phase.IDLE:
            return
        now = event.at
        self._stop(session, now)
        self._rest(session, now)

    def _rest(self, session: Session, now: float) -> None:
        """Note that a session without lease has no cell."""
        session.phase = Phase.IDLE
        session.timers += 1
        session.gaps.idle(now)
        session.account.rest(now)
        goal = target(session)
        if session.account.violates(goal):
            self._violations += 1
        self._ledger.deactivate(session.flow, now)

    def _stop(self, session: Session, now: float) -> None:
        """End whatever a session holds or waits for. Its phase is the caller's to set."""
        self._waiting.remove(session)
        self._running.remove(session)
        self._packing.withdraw(session)
        pack = self._packing.packs.get(session)
        if pack is not None:
            self._packing.part(pack, now, failed=False)
        if session.phase in HOLDING:
            self._turn += 0.05 * (now - session.granted_at - self._turn)
            before, session.attained = session.attained, session.attained_at(now)
            self._note_burst(session, before, now)
            session.clean_at = now + max(
                (device.transfer(session.memory) for device in session.devices), default=0.0
            )
            self._leases.started(session)
        if session.phase in HOLDING or session.phase is Phase.RESERVED:
            self._leases.end(session, now)
        if pack is not None:
            self._packing.offer(pack.guest if session is pack.host else pack.host)

    def _note_burst(self, session: Session, before: float, now: float) -> None:
        """Count what a lease has had at the interactive levels."""
        edge = self._settings.levels[INTERACTIVE]
        seconds = min(edge, session.attained) - min(edge, before)
        if seconds > 0.0 and session.flow.parent:
            self._ledger.burst(session.flow.parent, seconds * session.gpus, now)

    def _lose(self, session: Session, now: float) -> None:
        """Let a session wait that held a lease or a reservation."""
        if session.phase in HOLDING or session.phase is Phase.RESERVED:
            self._stop(session, now)
            self._wait_again(session, now)

    # Answers.

    def _current(self, name: str, token: int) -> Session | None:
        session = self._sessions.get(name)
        if session is None or session.phase not in HOLDING or session.token != token:
            return None
        return session

    def _started(self, event: events.Started) -> None:
        session = self._current(event.session, event.token)
        if session is None or session.phase is Phase.RUNNING:
            return
        now = event.at
        self._leases.started(session)
        if session.phase is Phase.STOPPING:  # it is to stop already
            session.attained, session.run_since = session.attained_at(now), now
            return
        session.phase = Phase.RUNNING
        session.run_since = now
        session.switch = now - session.granted_at
        session.account.execute(now)
        level = level_of(session.attained, self._settings)
        session.running_level = level
        session.protected_until = now + run_min(level, session.switch, self._settings)
        session.quantum_end = now + self._agenda.quantum_of(session, now)
        session.measured_at = now
        self._packing.offer(session)
        self._agenda.review(session, now)

    def _released(self, event: events.Released) -> None:
        session = self._current(event.session, event.token)
        if session is not None:
            self._lose(session, event.at)

    def _evicted(self, event: events.Evicted) -> None:
        session = self._sessions.get(event.session)
        device = self._leases.devices.get(event.device)
        if session is None or device is None or device in session.devices:
            return  # a lease there has begun since
        if session in device.residents:
            self._leases.left(session, device, event.at)

    def _moved(self, event: events.Moved) -> None:
        session = self._sessions.get(event.session)
        device = self._leases.devices.get(event.device)
        if session is not None and device is not None and session.phase not in HOLDING:
            self._leases.moved(session, device, event.at)

    def _failed(self, event: events.Failed) -> None:
        now = event.at
        if event.decision in ("grant", "preempt"):
            session = self._current(event.session, event.token)
            if session is not None:
                session.not_before = now + FAILURE_PAUSE
                self._lose(session, now)
                self._agenda.look_again(session.not_before)
        else:
            session = self._sessions.get(event.session)
            device = self._leases.devices.get(event.device)
            if session is not None and device is not None and session.moving:
                self._leases.stayed(session, device, now)
                self._agenda.look_again(session.stays_until)

    def _worker_died(self, event: events.WorkerDied) -> None:
        session = self._sessions.get(event.session)
        if session is not None:
            self._lose(session, event.at)
            self._leases.forget(session, event.at)

    def _device_failed(self, event: events.DeviceFailed) -> None:
        device = self._leases.devices.get(event.device)
        if device is not None:
            for session in self._leases.fail(device, event.at):
                self._lose(session, event.at)
                self._leases.forget(session, event.at)

    def _device_healed(self, event: events.DeviceHealed) -> None:
        device = self._leases.devices.get(event.device)
        if device is not None:
            self._leases.heal(device)

    # Measurements and settings.

    def _measured(self, event: events.Measured) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        self._leases.resize(session, event.memory)
        session.step_seconds = event.step_seconds
        session.nadir = event.nadir
        if event.at > session.measured_at:
            session.utilisation = min(1.0, event.seconds_used / (event.at - session.measured_at))
        session.measured_at = event.at
        pack = self._packing.packs.get(session)
        if pack is not None:
            total = self._packing.measured(session)
            if total is not None and total < UNDO:
                self._packing.part(pack, event.at, failed=True)
                self._running.remove(pack.guest)
                reason = f"with {pack.host.id} progress is {total:.2f} of taking turns"
                self._leases.preempt(pack.guest, reason, event.at)
        elif session.phase is Phase.RUNNING and event.step_seconds:
            session.rate_alone = 1.0 / event.step_seconds
            self._packing.offer(session)

    def _bandwidth(self, event: events.BandwidthMeasured) -> None:
        device = self._leases.devices.get(event.device)
        if device is not None and event.bytes_per_second > 0.0:
            device.bytes_per_second = event.bytes_per_second
            device.constant_seconds = max(0.0, event.constant_seconds)

    def _reconfigured(self, event: events.Reconfigured) -> None:
        self._settings = self._agenda.settings = event.settings
        self._waiting.throttle = event.settings.throttle
        self._waiting.burst = event.settings.burst
        self._leases.host.budget = event.settings.host_memory
        for flow in self._ledger.flows():
            weights = event.settings.user_weights
            if flow.parent is None:
                weight = event.settings.vc_weights.get(flow.name, 1.0)
            else:
                weight = weights.get((flow.parent.name, flow.name), 1.0)
            self._ledger.reweigh(flow, weight, event.at)

    def _ticked(self, event: events.Tick) -> None:
        """Nothing but that time has passed."""

    # Serving.

    def _serve(self, now: float) -> None:
        """Serve waiting sessions in order, as long as there is anything to give."""
        blocked = Blocked(self._running.has_own, self._promised)
        passed: list[Session] = []
        self._yielded.clear()
        while len(self._waiting) and (len(self._leases.free) or len(self._running)):
            session = self._waiting.best(now, blocked)
            if session is None or len(passed) >= SKIPS_MAX:
                break
            if session.gpus > 1 and now < self._gangs_after:
                blocked.add(session.vc, session.gpus)
                continue
            if session.moving or now < session.not_before:
                self._pass_over(session, passed)
                continue
            if session in self._yielded:
                self._agenda.look_again(now + YIELD_PAUSE)
                self._pass_over(session, passed)
                continue
            choice = self._placement.choose(session, self._agenda.level(session, now), now)
            if isinstance(choice, Later):
                self._agenda.look_again(choice.at)
                self._pass_over(session, passed)
            elif not self._carry_out(session, choice, now):
                if self._placement.cramped:
                    self._pass_over(session, passed)
                    continue
                blocked.add(session.vc, session.gpus)
                if now >= self._compared_after:
                    self._compared_after = now + COMPARISON_PAUSE
                    self._agenda.look_again(self._compared_after)
                if session.gpus > 1:
                    self._gangs_after = now + GANGS_PAUSE
                    self._agenda.look_again(self._gangs_after)
        for session in passed:
            self._waiting.add(session, self._agenda.level(session, now), now)
        if len(self._waiting) and not len(self._leases.free) and self._settings.packing:
            self._pack(now)

    def _pack(self, now: float) -> None:
        """Let waiting sessions share devices, where everybody permits it."""
        while (pair := self._packing.pair(now)) is not None:
            host, guest = pair
            self._waiting.remove(guest)
            self._packing.join(host, guest)
            self._leases.pack(host, guest, now)

    def _pass_over(self, session: Session, passed: list[Session]) -> None:
        """Leave a session out of the rest of this round."""
        self._waiting.remove(session)
        passed.append(session)

    def _carry_out(self, session: Session, choice: Choice | None, now: float) -> bool:
        self._waiting.remove(session)
        for victim in choice.victims if choice else ():
            self._running.remove(victim)
        if choice is not None:
            done = self._leases.take(session, choice.devices, choice.victims, choice.reason, now)
        else:
            done = self._leases.below(session.vc, session.gpus) and self._leases.entitle(
                session, now
            )
        if done:
            self._packing.withdraw(session)
        else:
            self._waiting.add(session, self._agenda.level(session, now), now)
        return done

    def _announce(self, name: str, now: float) -> None:
        """Say that a session has to wait."""
        session = self._sessions.get(name)
        if session is None or session.phase is not Phase.WAITING:
            return
        position = len(self._waiting)
        wait = position / max(1, len(self._leases.devices)) * self._turn
        devices = len(self._leases.devices)
        wanted = "1 device" if devices == 1 else f"{devices} devices"
        reason = f"{position} session{' waits' if position == 1 else 's wait'} for {wanted}"
        self._leases.out.append(Queued(session.id, position, wait, reason))
