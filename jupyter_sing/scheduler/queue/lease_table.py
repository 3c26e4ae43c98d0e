"""Leases: sessions hold devices from the grant on; two may share one; devices fail and heal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_sing.scheduler.decisions import Grant, Guarantees, Pack, Unpack
from jupyter_sing.scheduler.entitlements import Entitlements
from jupyter_sing.scheduler.fairness.fair_queue import ServiceLedger
from jupyter_sing.scheduler.fairness.limits import Limiter
from jupyter_sing.scheduler.queue.device_table import DeviceTable
from jupyter_sing.scheduler.queue.issued import IssuedDecisions
from jupyter_sing.scheduler.queue.packing import TURNS
from jupyter_sing.scheduler.queue.reservations import DeviceReservation, Reservations
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from jupyter_sing.scheduler.state import HOLDING, EngineDevice, EngineSession, Phase


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
        self.sessions: dict[str, EngineSession] = {}
        self.table = DeviceTable(devices, settings)
        self.issued = IssuedDecisions()
        self.entitlements = Entitlements(guarantees)
        self.reservations = Reservations(
            self.table, self.entitlements, self.issued, ledger, limiter, self.sessions, settings
        )
        self.reservations.requeue, self.reservations.grant = requeue, self._grant
        self.table.settle = self.reservations.settle
        self._ledger = ledger
        self._quantum = quantum
        self._partings: dict[EngineSession, str] = {}  # guests that must stop, and why

    def _grant(self, session: EngineSession, reservation: DeviceReservation, now: float) -> None:
        self.issued.token += 1
        session.lease.token = self.issued.token
        session.phase = Phase.LOADING
        session.lease.devices = reservation.devices
        session.lease.granted_at = now
        if session.gang is not None:
            session.gang.places = None
        if session.terms.pinned and session.gpus == 1:
            session.residency.pinned_on = session.lease.devices[0]
        session.lease.switch = max(device.switch(session) for device in reservation.devices)
        if session.lease.switch:
            self.issued.switches += 1
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
            self.table.free.update(device)
        self.table.host.leave(session)
        names = tuple(device.id for device in reservation.devices)
        self.issued.append(
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

    def end(self, session: EngineSession, now: float) -> None:
        """End the lease or reservation of a session; reservations that waited for it continue."""
        if session.phase is Phase.RESERVED:
            self.reservations.cancel(session, now)
            return
        self._ledger.hold(session.flow, -session.gpus * session.lease.share, now)
        session.lease.share = 1.0
        if not session.lease.is_guest:
            self.entitlements.release(session)
        for quota in session.quotas:
            quota.leave(session)
        why = self._partings.pop(session, f"{session.id} has stopped")
        for device in session.lease.devices:
            device.lessees.remove(session)
            self.table.free.update(device)
            for other in device.lessees:
                self._leave_alone(other, session, device, why, now)
        session.lease.is_guest = False
        session.lease.devices = session.residency.arriving = ()
        session.lease.right = ""
        self.reservations.continue_after(session, now)

    def pack(self, host: EngineSession, guest: EngineSession, now: float) -> None:
        """Grant a waiting session the device that another one executes on; both memories fit."""
        (device,) = host.lease.devices
        self._ledger.hold(host.flow, -0.5, now)
        self.reservations.enter(
            guest, DeviceReservation((device,), f"it shares it with {host.id}", bound=True)
        )
        self.reservations.hold(guest, 0.5, now)
        host.lease.share = guest.lease.share = 0.5
        guest.lease.is_guest = True
        names = (host.id, guest.id)
        reason = "both permit it, and a session waits for a device, so that it is tried"
        self.issued.append(Pack(names, device.id, reason))
        self.reservations.grant_if_ready(guest, now)

    def keep(self, host: EngineSession, guest: EngineSession, total: float) -> None:
        """Announce that a pair stays together, and why."""
        reason = f"{_worth(total)}, so that it is kept"
        self.issued.append(Pack((host.id, guest.id), host.lease.devices[0].id, reason))

    def part(self, guest: EngineSession, total: float, now: float) -> None:
        """Stop a guest because sharing is no faster than taking turns."""
        self._partings[guest] = _worth(total)
        self.issued.preempt(guest, f"sharing is not worth it: {self._partings[guest]}", now)

    def _leave_alone(
        self, other: EngineSession, gone: EngineSession, device: EngineDevice, why: str, now: float
    ) -> None:
        """Give a session all of the device that it shared; stop it if guarantees forbid that."""
        self.reservations.hold(other, 1.0 - other.lease.share, now)
        other.lease.share = 1.0
        names = (other.id, gone.id) if gone.lease.is_guest else (gone.id, other.id)
        self.issued.append(Unpack(names, device.id, why))
        if not other.lease.is_guest or other.phase is Phase.STOPPING or not device.healthy:
            return
        answer = self.entitlements.place_on(other, device.id)
        if answer is not None:
            other.lease.is_guest, other.lease.right = False, other.vc if answer.guaranteed else ""
            return
        self.issued.preempt(other, f"the device was {gone.id}'s", now)

    def fail(self, device: EngineDevice, now: float) -> list[EngineSession]:
        """Mark a device as failed; return the sessions that were resident or held leases there."""
        if not device.healthy:
            return []
        device.healthy = False
        self.table.free.update(device)
        self.entitlements.set_health(device, False)
        concerned = dict.fromkeys([*device.residents, *device.lessees])
        if device.incoming is not None:
            self.reservations.give_up(device.incoming, now)
        return list(concerned)

    def heal(self, device: EngineDevice) -> None:
        """Mark a device as usable again."""
        if not device.healthy:
            device.healthy = True
            self.table.free.update(device)
            self.entitlements.set_health(device, True)

    def govern(self, guarantees: Guarantees, now: float) -> None:
        """Use other guarantees: leases stay, and sessions with a reservation wait again."""
        for session in self.reservations:
            if session in self.reservations:
                self.reservations.give_up(session, now)
        self.entitlements.replace(guarantees)
        devices = self.table.devices.values()
        for device in devices:
            if not device.healthy:
                self.entitlements.set_health(device, False)
        holders = {s.lease.token: s for d in devices for s in d.lessees if not s.lease.is_guest}
        for _, session in sorted(holders.items()):
            self.entitlements.adopt(session)

    def configure(self, settings: EngineSettings) -> None:
        """Use other settings from now on."""
        self.reservations.settings = settings
        self.table.configure(settings)

    def widest(self) -> int:
        """Return the number of devices that one session could have at most."""
        nodes = max((len(devices) for devices in self.table.nodes.values()), default=0)
        return min(nodes, self.entitlements.widest())


def _worth(total: float) -> str:
    """Return the worth of sharing a device, as a clause."""
    return f"together they make {total:.2f} times the progress of one alone, and {TURNS} by turns"
