"""Reservations: devices are chosen for a session, their lessees stop, room is made.

Every step waits for the answer to the one before: `Preempt` for `Released`, `Evict` for `Evicted`.
So a device never has two holders, and never more bytes than it has memory, however slow an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jupyter_sing.scheduler.decisions import NoPlacement, Victims
from jupyter_sing.scheduler.entitlements import Entitlements
from jupyter_sing.scheduler.fairness.fair_queue import ServiceLedger
from jupyter_sing.scheduler.fairness.limits import Limiter
from jupyter_sing.scheduler.gangs.job_text import claim, shrink_text
from jupyter_sing.scheduler.queue.device_table import DeviceTable
from jupyter_sing.scheduler.queue.evictions import Evictions
from jupyter_sing.scheduler.queue.gangs import allowed, remaining
from jupyter_sing.scheduler.queue.issued import IssuedDecisions
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE
from jupyter_sing.scheduler.settings import EngineSettings
from jupyter_sing.scheduler.state import HOLDING, EngineDevice, EngineSession, Gang, Phase

NADIR_UNNOTICED = 0.05
"""Longest step, in seconds, whose nadir an interactive cell waits for."""


@dataclass(slots=True)
class DeviceReservation:
    """Reservation of a session: the conditions of its grant.

    `victims` have to stop, `leaving` (per session and device) to leave. `bound`: the guarantees
    have given it the devices, and it is charged for them.
    """

    devices: tuple[EngineDevice, ...]
    reason: str
    victims: dict[EngineSession, None] = field(default_factory=dict)
    leaving: dict[tuple[EngineSession, EngineDevice], None] = field(default_factory=dict)
    bound: bool = False
    asked: bool = False


class Reservations:
    """Reservations of sessions that wait for their grant.

    Attributes
    ----------
    requeue
        Called with a session that needed devices and cannot have them now: it waits again.
    grant
        Called with a session and its reservation, once its devices and their memory are free.
    """

    requeue: Callable[[EngineSession, float], None]
    grant: Callable[[EngineSession, DeviceReservation, float], None]

    def __init__(
        self,
        table: DeviceTable,
        entitlements: Entitlements,
        issued: IssuedDecisions,
        ledger: ServiceLedger,
        limiter: Limiter,
        sessions: dict[str, EngineSession],
        settings: EngineSettings,
    ) -> None:
        self._table = table
        self._entitlements = entitlements
        self._issued = issued
        self._ledger = ledger
        self._limiter = limiter
        self._sessions = sessions
        self.settings = settings
        self._evictions = Evictions(table, issued)
        self._reservations: dict[EngineSession, DeviceReservation] = {}

    def __iter__(self) -> Iterator[EngineSession]:
        """Iterate over the sessions that have reservations now."""
        return iter(list(self._reservations))

    def __contains__(self, session: EngineSession) -> bool:
        return session in self._reservations

    def awaited(self, session: EngineSession) -> tuple[float, str]:
        """Return about how long a session with a reservation waits, and what it waits for."""
        reservation = self._reservations[session]
        sizes = [(d, d.residents.get(leaving, 0)) for leaving, d in reservation.leaving]
        seconds = max((device.transfer(size) for device, size in sizes), default=0.0)
        if reservation.victims:
            return seconds, f"{next(iter(reservation.victims)).id} stops first"
        if reservation.leaving:
            first, _ = next(iter(reservation.leaving))
            return seconds, f"the memory of {first.id} makes room first"
        return seconds, "its devices are being prepared"

    def reserved(self, session: EngineSession) -> tuple[EngineDevice, ...]:
        """Return the devices of a session with a reservation."""
        return self._reservations[session].devices

    def take(
        self,
        session: EngineSession,
        devices: tuple[EngineDevice, ...],
        victims: Sequence[EngineSession],
        reason: str,
        now: float,
    ) -> bool:
        """Reserve devices for a waiting session; if impossible, change nothing and return False."""
        reservation = DeviceReservation(devices, reason)
        if victims:
            self.enter(session, reservation)
            self._reserve(session, devices)
            self._stop(session, reservation, victims, now)
            return True
        return self._bind(session, reservation, now)

    def entitle(self, session: EngineSession, now: float) -> bool:
        """Let the guarantees choose devices that the virtual cluster is entitled to."""
        homes = session.residency.homes if session.only is None else [session.only]
        prefer = tuple(home for home in homes if home.healthy)
        return self._bind(
            session, DeviceReservation(prefer, "its virtual cluster's guarantee"), now
        )

    def _bind(self, session: EngineSession, reservation: DeviceReservation, now: float) -> bool:
        prefer = [device.id for device in reservation.devices]
        answer = self._entitlements.place(session, prefer, asked=reservation.asked)
        if isinstance(answer, NoPlacement):
            return False
        devices = tuple(self._table.devices[name] for name in answer.devices)
        elsewhere = session.only is not None and devices != (session.only,)
        elsewhere = elsewhere or any(self._table.refusals.holds(session, d, now) for d in devices)
        if elsewhere or any(d.incoming not in (None, session) or not d.healthy for d in devices):
            self._entitlements.undo(session, answer)
            return False
        if isinstance(answer, Victims):
            victims = [self._sessions[name] for name in answer.requests]
            if any(v.phase not in (*HOLDING, Phase.RESERVED) for v in victims):
                self._entitlements.undo(session, answer)
                return False
            reservation.asked = True
            self._move(session, reservation, devices)
            self._stop(session, reservation, victims, now)
            return True
        if any(device.lessees for device in devices):
            self._entitlements.undo(session, answer)
            return False
        self._move(session, reservation, devices)
        session.lease.right = session.vc if answer.guaranteed else ""
        reservation.bound = True
        self.hold(session, session.gpus, now)
        return self._make_room(session, reservation, now)

    def _move(
        self,
        session: EngineSession,
        reservation: DeviceReservation,
        devices: tuple[EngineDevice, ...],
    ) -> None:
        """Reserve these devices instead of the previous ones."""
        for device in reservation.devices:
            if device.incoming is session:
                device.incoming = None
                self._table.free.update(device)
        reservation.devices = devices
        self.enter(session, reservation)
        self._reserve(session, devices)

    def enter(self, session: EngineSession, reservation: DeviceReservation) -> None:
        """Record that a session waits for nothing but its grant."""
        session.phase = Phase.RESERVED
        self._reservations[session] = reservation
        for quota in session.quotas:
            quota.claim(session)

    def hold(self, session: EngineSession, devices: float, now: float) -> None:
        """Charge a session for this many more devices from now on."""
        if session.phase is Phase.RESERVED:
            session.account.hold(now)
        self._ledger.hold(session.flow, devices, now)
        for quota in session.quotas:
            if quota.bounded:
                self._limiter.watch(quota.flow, now)

    def _reserve(self, session: EngineSession, devices: tuple[EngineDevice, ...]) -> None:
        for device in devices:
            device.incoming = session
            self._table.free.update(device)

    def _stop(
        self,
        session: EngineSession,
        reservation: DeviceReservation,
        victims: Sequence[EngineSession],
        now: float,
    ) -> None:
        for victim in victims:
            reservation.victims[victim] = None
            if victim.phase in (Phase.RUNNING, Phase.LOADING):
                if victim.gang is not None and self._shrink(
                    victim, victim.gang, reservation, session, now
                ):
                    continue
                reason = f"{session.id} goes first: {reservation.reason}"
                self._issued.preempt(victim, reason, now, self._nadir(session, victim))
            elif victim.phase is Phase.RESERVED:
                self.give_up(victim, now)

    def _shrink(
        self,
        victim: EngineSession,
        gang: Gang,
        reservation: DeviceReservation,
        session: EngineSession,
        now: float,
    ) -> bool:
        """Let a gang continue on some of its devices, if it can, instead of preempting it."""
        size = remaining(victim, reservation.devices, now, allowed(victim))
        if not size:
            return False
        gang.given = reservation.devices
        gang.cause, gang.shrunk = claim(session, victim, guaranteed=reservation.asked), True
        reason = shrink_text(gang.ranks, victim.gpus, size, gang.cause)
        self._issued.resize(victim, size, reason, now)
        return True

    def _nadir(self, session: EngineSession, victim: EngineSession) -> float:
        """Return the seconds that a victim may take to reach the memory nadir of its step.

        An interactive cell waits for the nadir only if its user cannot notice that.
        """
        if victim.usage.step_seconds is None or victim.usage.nadir is None:
            return 0.0
        interactive = session.attained < self.settings.levels[INTERACTIVE]
        limit = NADIR_UNNOTICED if interactive else self.settings.nadir_wait
        return victim.usage.step_seconds if victim.usage.step_seconds <= limit else 0.0

    def _make_room(
        self, session: EngineSession, reservation: DeviceReservation, now: float
    ) -> bool:
        beyond = self._limiter.leaving(session, now)
        plans = None
        if beyond is not None:
            plans = self._evictions.plan(session, reservation.devices, beyond, now)
        if beyond is None or plans is None:
            self.give_up(session, now)
            return True
        for victim, device in beyond:
            reservation.leaving[victim, device] = None
            if device not in victim.residency.moving:
                self._evictions.evict(victim, device, session)
        for device, plan in zip(reservation.devices, plans, strict=True):
            for victim in plan.victims:
                reservation.leaving[victim, device] = None
                self._evictions.migrate_or_evict(victim, device, session, now)
        size = session.memory * session.gpus
        for quota in session.quotas:
            quota.expect(session, max(0, size - quota.residents.get(session, 0)))
        self.grant_if_ready(session, now)
        return True

    def grant_if_ready(self, session: EngineSession, now: float) -> None:
        """Grant a session its devices if nothing is in their way any more."""
        reservation = self._reservations[session]
        if not (reservation.victims or reservation.leaving) and reservation.bound:
            del self._reservations[session]
            self.grant(session, reservation, now)

    def continue_after(self, gone: EngineSession, now: float) -> None:
        """Continue the reservations that waited for a session to stop."""
        for waiting in [s for s, r in self._reservations.items() if gone in r.victims]:
            self._freed(waiting, gone, now)

    def _freed(self, waiting: EngineSession, victim: EngineSession, now: float) -> None:
        reservation = self._reservations[waiting]
        del reservation.victims[victim]
        if not reservation.victims and not self._bind(waiting, reservation, now):
            self.give_up(waiting, now)

    def cancel(self, session: EngineSession, now: float) -> None:
        reservation = self._reservations.pop(session)
        if reservation.bound:
            self._ledger.hold(session.flow, -session.gpus, now)
            self._entitlements.release(session)
        elif reservation.asked:
            self._entitlements.cancel(session)
        session.lease.right = ""
        for quota in session.quotas:
            quota.leave(session)
        for device in reservation.devices:
            if device.incoming is session:
                device.incoming = None
                self._table.free.update(device)
        self.continue_after(session, now)

    def give_up(self, session: EngineSession, now: float) -> None:
        """Cancel a reservation; the session waits again."""
        self.cancel(session, now)
        self.requeue(session, now)

    def settle(self, session: EngineSession, now: float) -> None:
        """Continue reservations whose device a session has left; if it stays, give them up."""
        for waiting, reservation in list(self._reservations.items()):
            for device in [d for leaving, d in reservation.leaving if leaving is session]:
                if waiting not in self._reservations or device in session.residency.moving:
                    continue
                if session in device.residents:
                    self.give_up(waiting, now)
                    continue
                del reservation.leaving[session, device]
                self.grant_if_ready(waiting, now)
