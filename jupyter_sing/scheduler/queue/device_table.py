"""Devices, and the memory of sessions on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_sing.scheduler.queue.residency import HostMemoryEstimate
from jupyter_sing.scheduler.refusals import Refusals
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, FreeDevices

FAILURE_PAUSE = 1.0
"""Seconds before a failed eviction or migration is retried."""


class DeviceTable:
    """All devices, with what is free, and with the memory of each session.

    Attributes
    ----------
    largest
        Bytes of the largest device.
    settle
        Called with a session that has left a device, or stays on it after all.
    """

    def __init__(self, devices: Sequence[DeviceSpec], settings: EngineSettings) -> None:
        self.devices = {
            device.id: EngineDevice(device, number, settings.swap_share)
            for number, device in enumerate(devices)
        }
        self.nodes: dict[str, list[EngineDevice]] = {}
        self.free = FreeDevices()
        for device in self.devices.values():
            self.nodes.setdefault(device.node, []).append(device)
            self.free.update(device)
        self.largest = max((device.memory for device in self.devices.values()), default=0)
        self.host = HostMemoryEstimate(settings.host_memory)
        self.refusals = Refusals()
        self.settle: Callable[[EngineSession, float], None] = lambda session, now: None

    def configure(self, settings: EngineSettings) -> None:
        """Use other settings from now on."""
        self.host.budget = settings.host_memory
        for device in self.devices.values():
            device.budget.set_rate(settings.swap_share)

    def tried_again(self, session: EngineSession, now: float) -> float:
        """Return when a session may be granted a device: after now only if grants failed on all."""
        usable = self.devices.values() if session.only is None else [session.only]
        return self.refusals.until(session, (d for d in usable if d.healthy), now)

    def arrived(self, session: EngineSession, *, resident: bool = True) -> None:
        """Record that a session has left its former devices for those of its lease.

        If it is not `resident`, its memory is yet to come.
        """
        for home in session.residency.homes:
            if home not in session.lease.devices:
                home.drop(session)
                self.free.update(home)
        session.residency.homes = [d for d in session.lease.devices if session in d.residents]
        if resident:
            session.residency.arriving = ()

    def turn_back(self, session: EngineSession, now: float) -> None:
        """Record that the memory of a session does not come to the devices of its lease."""
        for device in session.residency.arriving:
            device.drop(session)
            session.residency.homes.remove(device)
            self.free.update(device)
        session.residency.arriving = ()

    def left(self, session: EngineSession, device: EngineDevice, now: float) -> None:
        """Record that the bytes of a session are off a device."""
        device.drop(session)
        session.residency.moving.pop(device, None)
        if device in session.residency.homes:
            session.residency.homes.remove(device)
        self.free.update(device)
        self.refusals.relent(device)
        self.settle(session, now)

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
        self.settle(session, now)

    def stayed(self, session: EngineSession, device: EngineDevice, now: float) -> None:
        """Record a failed eviction or migration; sessions that needed the room wait again."""
        target = session.residency.moving.pop(device)
        session.residency.stays_until = now + FAILURE_PAUSE
        self.host.leave(session)
        if target is not None and target not in session.residency.homes:
            target.drop(session)
            self.free.update(target)
        self.settle(session, now)

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
        self.settle(session, now)

    def resize(self, session: EngineSession, memory: int) -> None:
        """Set how many bytes per device a session holds, or a gang per rank."""
        before = session.memory
        if session.gang is None:
            session.memory = memory
        else:
            session.gang.rank_memory, ranks = memory, session.gang.rank_memory
            session.size_to(session.gpus)
        for device in session.residency.homes:
            if session.memory < before:
                self.refusals.relent(device)
            if session not in device.residents:
                continue
            size = session.memory
            if session.gang is not None and device not in session.lease.devices:
                here = device.residents[session]
                size = here * memory // ranks if ranks else here
            device.put(session, size)
            self.free.update(device)

    def locate(
        self,
        session: EngineSession,
        places: dict[EngineDevice, int],
        held: Sequence[EngineDevice],
        now: float,
        *,
        left: bool,
    ) -> None:
        """Record where the memory of a gang is, except on the devices that it holds.

        `left`: it was where it is not now; otherwise that was only assumed.
        """
        for device in self.devices.values():
            size = places.get(device, 0)
            if device in held or size == device.residents.get(session, 0):
                continue
            if size:
                device.put(session, size)
            else:
                device.drop(session)
                session.residency.moving.pop(device, None)
                if left:
                    self.refusals.relent(device)
            self.free.update(device)
        session.residency.homes = [
            *(d for d in held if session in d.residents),
            *(d for d in places if d not in held),
        ]
        self.settle(session, now)
