"""Leases: devices are reserved, lessees stop, room is made, the grant is given.

Every step waits for the answer to the one before: `Preempt` for `Released`, `Evict` for `Evicted`.
So a device never has two holders, and never more bytes than it has memory, however slow an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from jupyter_sing.scheduler.decisions import (
    Bound,
    Decision,
    Evict,
    Grant,
    Guarantees,
    MigrateMemory,
    NoPlacement,
    Pack,
    Preempt,
    Unpack,
    Victims,
)
from jupyter_sing.scheduler.fairness.fair_queue import ServiceLedger
from jupyter_sing.scheduler.fairness.limits import Limiter
from jupyter_sing.scheduler.hived.errors import RequestError
from jupyter_sing.scheduler.queue.packing import TURNS
from jupyter_sing.scheduler.queue.refusals import Refusals
from jupyter_sing.scheduler.queue.residency import NO_VICTIMS, HostMemoryEstimate, room
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from jupyter_sing.scheduler.state import HOLDING, EngineDevice, EngineSession, FreeDevices, Phase

FAILURE_PAUSE = 1.0
"""Seconds before a failed eviction or migration is retried."""

NADIR_UNNOTICED = 0.05
"""Longest step, in seconds, whose nadir an interactive cell waits for."""

MIGRATION_PAUSE = 60.0
"""Seconds between two migrations of the same session."""


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


class LeaseTable:
    """Devices with their present and future holders.

    Parameters
    ----------
    requeue
        Called with a session that needed devices and cannot have them now: it waits again.
    quantum
        Returns the quantum, in seconds, of a lease that begins now.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        settings: EngineSettings,
        guarantees: Guarantees,
        ledger: ServiceLedger,
        limiter: Limiter,
        requeue: Callable[[EngineSession, float], None],
        quantum: Callable[[EngineSession, float], float],
    ) -> None:
        self.devices = {
            device.id: EngineDevice(device, number, settings.swap_share)
            for number, device in enumerate(devices)
        }
        self.nodes: dict[str, list[EngineDevice]] = {}
        self.free = FreeDevices()
        for device in self.devices.values():
            self.nodes.setdefault(device.node, []).append(device)
            self.free.update(device)
        self.host = HostMemoryEstimate(settings.host_memory)
        self.refusals = Refusals()
        self.out: list[Decision] = []
        self.sessions: dict[str, EngineSession] = {}
        self.switches = 0
        self.preemptions = 0
        self.evictions = 0
        self.migrations = 0
        self.token = 0
        self._settings = settings
        self._guarantees = guarantees
        self._ledger = ledger
        self._limiter = limiter
        self._requeue = requeue
        self._quantum = quantum
        self._reservations: dict[EngineSession, DeviceReservation] = {}
        self._partings: dict[EngineSession, str] = {}  # guests that must stop, and why
        self._entitled: dict[str, int] = {}

    def below(self, vc: str, gpus: int) -> bool:
        """True if a virtual cluster could have this many guaranteed devices now."""
        known = self._entitled.get(vc)
        if known is None:
            known = self._entitled[vc] = self._guarantees.free(vc)
        return known >= gpus

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

    def tried_again(self, session: EngineSession, now: float) -> float:
        """Return when a session may be granted a device: after now only if grants failed on all."""
        usable = self.devices.values() if session.only is None else [session.only]
        return self.refusals.until(session, (d for d in usable if d.healthy), now)

    def reserved(self, session: EngineSession) -> tuple[EngineDevice, ...]:
        """Return the devices of a session with a reservation."""
        return self._reservations[session].devices

    # Taking devices.

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
            self._enter(session, reservation)
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
        priority = 0 if self.below(session.vc, session.gpus) or reservation.asked else -1
        answer = self._guarantees.place(session.id, session.vc, priority, session.gpus, prefer)
        if isinstance(answer, NoPlacement) and priority == 0:
            answer = self._guarantees.place(session.id, session.vc, -1, session.gpus, prefer)
        self._entitled.clear()
        if isinstance(answer, NoPlacement):
            return False
        devices = tuple(self.devices[name] for name in answer.devices)
        elsewhere = session.only is not None and devices != (session.only,)
        elsewhere = elsewhere or any(self.refusals.holds(session, d, now) for d in devices)
        if elsewhere or any(d.incoming not in (None, session) or not d.healthy for d in devices):
            self._undo(session, answer)
            return False
        if isinstance(answer, Victims):
            victims = [self.sessions[name] for name in answer.requests]
            if any(v.phase not in (*HOLDING, Phase.RESERVED) for v in victims):
                self._undo(session, answer)
                return False
            reservation.asked = True
            self._move(session, reservation, devices)
            self._stop(session, reservation, victims, now)
            return True
        if any(device.lessees for device in devices):
            self._undo(session, answer)
            return False
        self._move(session, reservation, devices)
        session.lease.right = session.vc if answer.guaranteed else ""
        reservation.bound = True
        self._hold(session, session.gpus, now)
        return self._make_room(session, reservation, now)

    def _undo(self, session: EngineSession, answer: Bound | Victims) -> None:
        if isinstance(answer, Bound):
            self._guarantees.release(session.id)
        else:
            self._guarantees.cancel(session.id)
        self._entitled.clear()

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
                self.free.update(device)
        reservation.devices = devices
        self._enter(session, reservation)
        self._reserve(session, devices)

    def _enter(self, session: EngineSession, reservation: DeviceReservation) -> None:
        """Record that a session waits for nothing but its grant."""
        session.phase = Phase.RESERVED
        self._reservations[session] = reservation
        for quota in session.quotas:
            quota.claim(session)

    def _hold(self, session: EngineSession, devices: float, now: float) -> None:
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
            self.free.update(device)

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
                reason = f"{session.id} goes first: {reservation.reason}"
                self.preempt(victim, reason, now, self._nadir(session, victim))
            elif victim.phase is Phase.RESERVED:
                self.give_up(victim, now)

    def preempt(self, session: EngineSession, reason: str, now: float, nadir: float = 0.0) -> None:
        """Request the end of a lease."""
        if session.phase is Phase.LOADING:
            session.lease.run_since = now
        session.phase = Phase.STOPPING
        self.preemptions += 1
        self.out.append(Preempt(session.id, session.lease.token, reason, nadir))

    def _nadir(self, session: EngineSession, victim: EngineSession) -> float:
        """Return the seconds that a victim may take to reach the memory nadir of its step.

        An interactive cell waits for the nadir only if its user cannot notice that.
        """
        if victim.usage.step_seconds is None or victim.usage.nadir is None:
            return 0.0
        interactive = session.attained < self._settings.levels[INTERACTIVE]
        limit = NADIR_UNNOTICED if interactive else self._settings.nadir_wait
        return victim.usage.step_seconds if victim.usage.step_seconds <= limit else 0.0

    def _make_room(
        self, session: EngineSession, reservation: DeviceReservation, now: float
    ) -> bool:
        beyond = self._limiter.leaving(session, now)
        plans = [
            room(
                session,
                device,
                now,
                freed=sum(other.residents[s] for s, other in beyond or () if other is device),
                spared=tuple(s for s, _ in beyond or ()),
            )
            for device in reservation.devices
        ]
        if beyond is None or any(plan is None for plan in plans):
            self.give_up(session, now)
            return True
        for victim, device in beyond:
            reservation.leaving[victim, device] = None
            if device not in victim.residency.moving:
                self._park(victim, device, session)
        for device, plan in zip(reservation.devices, plans, strict=True):
            assert plan is not None
            for victim in plan.victims:
                reservation.leaving[victim, device] = None
                self._send_away(victim, device, session, now)
        size = session.memory * session.gpus
        for quota in session.quotas:
            quota.expect(session, max(0, size - quota.residents.get(session, 0)))
        self._grant_if_ready(session, now)
        return True

    def _send_away(
        self, victim: EngineSession, device: EngineDevice, session: EngineSession, now: float
    ) -> None:
        """Move the memory of an idle session to another device that has room, or to the host."""
        size = device.residents[victim]
        may_move = (
            victim.residency.bound is None and now - victim.residency.migrated_at >= MIGRATION_PAUSE
        )
        if may_move and len(victim.residency.homes) == 1:
            for other in self.free.roomiest(1):
                if room(victim, other, now) == NO_VICTIMS:
                    victim.residency.moving[device] = other
                    other.put(victim, size)
                    self.free.update(other)
                    victim.residency.migrated_at = now
                    self.migrations += 1
                    self.out.append(
                        MigrateMemory(
                            victim.id, device.id, other.id, f"makes room for {session.id}"
                        )
                    )
                    return
        self._park(victim, device, session)

    def _park(self, victim: EngineSession, device: EngineDevice, session: EngineSession) -> None:
        """Take the memory of an idle session off a device."""
        victim.residency.moving[device] = None
        size = device.residents[victim]
        self.evictions += 1
        to: Literal["host", "disk"] = (
            "host" if self.host.try_park(victim, device.node, size) else "disk"
        )
        self.out.append(Evict(victim.id, device.id, to, f"makes room for {session.id}"))

    def _grant_if_ready(self, session: EngineSession, now: float) -> None:
        reservation = self._reservations[session]
        if reservation.victims or reservation.leaving or not reservation.bound:
            return
        del self._reservations[session]
        self.token += 1
        session.lease.token = self.token
        session.phase = Phase.LOADING
        session.lease.devices = reservation.devices
        session.lease.granted_at = now
        if session.terms.pinned and session.gpus == 1:
            session.residency.pinned_on = session.lease.devices[0]
        session.lease.switch = max(device.switch(session) for device in reservation.devices)
        if session.lease.switch:
            self.switches += 1
        for quota in session.quotas:
            quota.expect(session, 0)
        session.residency.arriving = tuple(
            d for d in reservation.devices if session not in d.residents
        )
        for device in reservation.devices:
            device.budget.spend(session.lease.switch, now)
            device.incoming = None
            device.lessees.append(session)
            device.put(session, session.memory)
            if device not in session.residency.homes:
                session.residency.homes.append(device)
            self.free.update(device)
        self.host.leave(session)
        names = tuple(device.id for device in reservation.devices)
        self.out.append(
            Grant(
                session.id,
                names,
                session.lease.token,
                self._quantum(session, now),
                reservation.reason,
            )
        )

    def held(self) -> dict[str, tuple[str, int]]:
        """Return device and token of every lease, by session; of several devices, the first."""
        return {
            each.id: (each.lease.devices[0].id, each.lease.token)
            for each in self.sessions.values()
            if each.phase in HOLDING
        }

    # Giving devices back.

    def arrived(self, session: EngineSession, *, resident: bool = True) -> None:
        """Record that a session has left its former devices for those of its lease.

        If it is not `resident`, its memory is yet to come.
        """
        for home in session.residency.homes:
            if home not in session.lease.devices:
                home.drop(session)
                self.free.update(home)
        session.residency.homes = list(session.lease.devices)
        if resident:
            session.residency.arriving = ()

    def turn_back(self, session: EngineSession, now: float) -> None:
        """Record that the memory of a session does not come to the devices of its lease."""
        for device in session.residency.arriving:
            device.drop(session)
            session.residency.homes.remove(device)
            self.free.update(device)
        session.residency.arriving = ()

    def end(self, session: EngineSession, now: float) -> None:
        """End the lease or reservation of a session; reservations that waited for it continue."""
        if session.phase is Phase.RESERVED:
            self._cancel(session, now)
            return
        self._ledger.hold(session.flow, -session.gpus * session.lease.share, now)
        session.lease.share = 1.0
        if not session.lease.rides:
            self._guarantees.release(session.id)
        self._entitled.clear()
        for quota in session.quotas:
            quota.leave(session)
        why = self._partings.pop(session, f"{session.id} has stopped")
        for device in session.lease.devices:
            device.lessees.remove(session)
            self.free.update(device)
            for other in device.lessees:
                self._leave_alone(other, session, device, why, now)
        session.lease.rides = False
        session.lease.devices = session.residency.arriving = ()
        session.lease.right = ""
        for waiting in [s for s, r in self._reservations.items() if session in r.victims]:
            self._freed(waiting, session, now)

    # Sharing.

    def pack(self, host: EngineSession, guest: EngineSession, now: float) -> None:
        """Grant a waiting session the device that another one executes on; both memories fit."""
        (device,) = host.lease.devices
        self._ledger.hold(host.flow, -0.5, now)
        self._enter(guest, DeviceReservation((device,), f"it shares it with {host.id}", bound=True))
        self._hold(guest, 0.5, now)
        host.lease.share = guest.lease.share = 0.5
        guest.lease.rides = True
        names = (host.id, guest.id)
        reason = "both permit it and somebody waits for a device, so that it is tried"
        self.out.append(Pack(names, device.id, reason))
        self._grant_if_ready(guest, now)

    def keep(self, host: EngineSession, guest: EngineSession, total: float) -> None:
        """Announce that a pair stays together, and why."""
        reason = f"{_worth(total)}, so that it is kept"
        self.out.append(Pack((host.id, guest.id), host.lease.devices[0].id, reason))

    def part(self, guest: EngineSession, total: float, now: float) -> None:
        """Stop a guest because sharing is no faster than taking turns."""
        self._partings[guest] = _worth(total)
        self.preempt(guest, f"sharing is not worth it: {self._partings[guest]}", now)

    def _leave_alone(
        self, other: EngineSession, gone: EngineSession, device: EngineDevice, why: str, now: float
    ) -> None:
        """Give a session all of the device that it shared; stop it if guarantees forbid that."""
        self._hold(other, 1.0 - other.lease.share, now)
        other.lease.share = 1.0
        names = (other.id, gone.id) if gone.lease.rides else (gone.id, other.id)
        self.out.append(Unpack(names, device.id, why))
        if not other.lease.rides or other.phase is Phase.STOPPING or not device.healthy:
            return
        priority = 0 if self.below(other.vc, 1) else -1
        answer = self._guarantees.place(other.id, other.vc, priority, 1, [device.id])
        if isinstance(answer, Bound) and answer.devices == (device.id,):
            other.lease.rides, other.lease.right = False, other.vc if answer.guaranteed else ""
            self._entitled.clear()
            return
        if not isinstance(answer, NoPlacement):
            self._undo(other, answer)
        self.preempt(other, f"the device was {gone.id}'s", now)

    def _freed(self, waiting: EngineSession, victim: EngineSession, now: float) -> None:
        reservation = self._reservations[waiting]
        del reservation.victims[victim]
        if not reservation.victims and not self._bind(waiting, reservation, now):
            self.give_up(waiting, now)

    def _cancel(self, session: EngineSession, now: float) -> None:
        reservation = self._reservations.pop(session)
        if reservation.bound:
            self._ledger.hold(session.flow, -session.gpus, now)
            self._guarantees.release(session.id)
        elif reservation.asked:
            self._guarantees.cancel(session.id)
        self._entitled.clear()
        session.lease.right = ""
        for quota in session.quotas:
            quota.leave(session)
        for device in reservation.devices:
            if device.incoming is session:
                device.incoming = None
                self.free.update(device)
        for waiting in [s for s, r in self._reservations.items() if session in r.victims]:
            self._freed(waiting, session, now)

    def give_up(self, session: EngineSession, now: float) -> None:
        """Cancel a reservation; the session waits again."""
        self._cancel(session, now)
        self._requeue(session, now)

    # Memory.

    def left(self, session: EngineSession, device: EngineDevice, now: float) -> None:
        """Record that the bytes of a session are off a device."""
        device.drop(session)
        session.residency.moving.pop(device, None)
        if device in session.residency.homes:
            session.residency.homes.remove(device)
        self.free.update(device)
        self.refusals.relent(device)
        self._settle(session, now)

    def moved(
        self, session: EngineSession, target: EngineDevice, now: float, *, resident: bool
    ) -> None:
        """Record that a session belongs to a device from now on, and is `resident` there or not."""
        session.residency.moving.clear()
        if resident:
            self.host.leave(session)
        if session.residency.bound is not None:
            session.residency.bound = target
        if session.residency.pinned_on is not None:
            session.residency.pinned_on = target
        before = list(session.residency.homes)
        for device in self.devices.values():
            if device is not target or not resident:
                device.drop(session)
        session.residency.homes = [target] if resident else []
        if resident:
            target.put(session, session.memory)
        for device in dict.fromkeys([*before, target]):
            self.free.update(device)
            if device is not target:
                self.refusals.relent(device)
        self._settle(session, now)

    def stayed(self, session: EngineSession, device: EngineDevice, now: float) -> None:
        """Record a failed eviction or migration; sessions that needed the room wait again."""
        target = session.residency.moving.pop(device)
        session.residency.stays_until = now + FAILURE_PAUSE
        self.host.leave(session)
        if target is not None and target not in session.residency.homes:
            target.drop(session)
            self.free.update(target)
        self._settle(session, now)

    def _settle(self, session: EngineSession, now: float) -> None:
        """Continue reservations whose device a session has left; if it stays, give them up."""
        for waiting, reservation in list(self._reservations.items()):
            for device in [d for leaving, d in reservation.leaving if leaving is session]:
                if waiting not in self._reservations or device in session.residency.moving:
                    continue
                if session in device.residents:
                    self.give_up(waiting, now)
                    continue
                del reservation.leaving[session, device]
                self._grant_if_ready(waiting, now)

    def forget(self, session: EngineSession, now: float) -> None:
        """Drop all memory of a session: its worker is gone."""
        session.residency.moving.clear()
        self.host.leave(session)
        session.residency.homes = []
        for device in self.devices.values():
            if session in device.residents:
                device.drop(session)
                self.free.update(device)
                self.refusals.relent(device)
        self._settle(session, now)

    def resize(self, session: EngineSession, memory: int) -> None:
        """Set how many bytes per device a session holds."""
        less, session.memory = memory < session.memory, memory
        for device in session.residency.homes:
            if less:
                self.refusals.relent(device)
            if session in device.residents:
                device.put(session, memory)
                self.free.update(device)

    # Health.

    def fail(self, device: EngineDevice, now: float) -> list[EngineSession]:
        """Mark a device as failed; return the sessions that were resident or held leases there."""
        if not device.healthy:
            return []
        device.healthy = False
        self.free.update(device)
        self._set_health(device, False)
        self._entitled.clear()
        concerned = dict.fromkeys([*device.residents, *device.lessees])
        if device.incoming is not None:
            self.give_up(device.incoming, now)
        return list(concerned)

    def heal(self, device: EngineDevice) -> None:
        """Mark a device as usable again."""
        if not device.healthy:
            device.healthy = True
            self.free.update(device)
            self._set_health(device, True)
            self._entitled.clear()

    def _set_health(self, device: EngineDevice, good: bool) -> None:
        with suppress(RequestError):  # no cell contains it, so no guarantee can give it out
            self._guarantees.set_health(device.id, good)

    # Other guarantees.

    def govern(self, guarantees: Guarantees, now: float) -> None:
        """Use other guarantees: leases stay, and sessions with a reservation wait again."""
        for session in list(self._reservations):
            if session in self._reservations:
                self.give_up(session, now)
        self._guarantees = guarantees
        self._entitled.clear()
        for device in self.devices.values():
            if not device.healthy:
                self._set_health(device, False)
        holders = {
            s.lease.token: s for d in self.devices.values() for s in d.lessees if not s.lease.rides
        }
        for _, session in sorted(holders.items()):
            names = [device.id for device in session.lease.devices]
            kept = guarantees.adopt(session.id, session.vc, names)
            session.lease.right = session.vc if kept else ""

    def configure(self, settings: EngineSettings) -> None:
        """Use other settings from now on."""
        self._settings = settings
        self.host.budget = settings.host_memory
        for device in self.devices.values():
            device.budget.set_rate(settings.swap_share)

    def widest(self) -> int:
        """Return the number of devices that one session could have at most."""
        nodes = max((len(devices) for devices in self.nodes.values()), default=0)
        return min(nodes, self._guarantees.widest())


def _worth(total: float) -> str:
    """Return the worth of sharing a device, as a clause."""
    return f"together they make {total:.2f} times the progress of one alone, and {TURNS} by turns"
