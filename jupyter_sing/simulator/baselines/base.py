"""Base of all baselines: leases of whole devices, and room for what is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jupyter_sing.scheduler.decisions import Decision, Evict, Grant, Preempt
from jupyter_sing.scheduler.events import (
    CellFinished,
    CellSubmitted,
    Event,
    Evicted,
    Released,
    SessionAdded,
    SessionRemoved,
    Started,
    Tick,
)
from jupyter_sing.scheduler.ids import DeviceId, SessionId
from jupyter_sing.scheduler.settings import DeviceSpec


@dataclass(eq=False)
class BaselineSession:
    """A session, as a baseline sees it."""

    name: SessionId
    gpus: int
    memory: int
    arrival: int = 0  # number of its submission: the order among those that wait
    has_cell: bool = False
    devices: tuple[DeviceId, ...] = ()  # of its lease, or of the one that waits for room
    token: int = 0
    started: float | None = None
    stopping: bool = False
    attained: float = 0.0  # seconds that its cell executed under earlier leases
    awaited: set[tuple[SessionId, DeviceId]] = field(default_factory=set)  # evictions of others
    evicted_from: set[DeviceId] = field(default_factory=set)  # its own evictions, under way


class Baseline:
    """Cells lease whole devices; the least recently used session makes room.

    A subclass decides in `schedule`, called after every event, which session gets which devices.

    Parameters
    ----------
    devices : sequence of DeviceSpec
    """

    reason = "Its turn."

    def __init__(self, devices: Sequence[DeviceSpec]) -> None:
        self.order = [device.id for device in devices]
        self.members: dict[SessionId, BaselineSession] = {}
        self.now = 0.0
        self._memory = {device.id: device.memory for device in devices}
        self._holder: dict[DeviceId, BaselineSession | None] = dict.fromkeys(self.order)
        # Bytes on each device by session, in the order of use.
        self._held: dict[DeviceId, dict[SessionId, int]] = {d: {} for d in self.order}
        self._decisions: list[Decision] = []
        self._token = 0
        self._arrivals = 0

    # For subclasses to override.

    def schedule(self) -> None:
        """Lease what can be leased; called after every event."""
        raise NotImplementedError

    def next_tick(self) -> float | None:
        """Return when it needs a `Tick`, if no event comes before."""
        return None

    def opened(self, member: BaselineSession) -> None:
        """Handle a new session."""

    def submitted(self, member: BaselineSession) -> None:
        """Handle a submitted cell."""

    def finished(self, member: BaselineSession) -> None:
        """Handle a finished cell."""

    def released(self, member: BaselineSession) -> None:
        """Handle the preemption of a cell."""

    def closed(self, member: BaselineSession) -> None:
        """Handle a closed session."""

    # For subclasses to use.

    def free(self) -> list[DeviceId]:
        """Return the devices without a lease."""
        return [device for device in self.order if self._holder[device] is None]

    def choose(self, member: BaselineSession) -> tuple[DeviceId, ...] | None:
        """Choose free devices: where it is resident, then where most memory is free."""
        free = self.free()
        if len(free) < member.gpus:
            return None
        free.sort(
            key=lambda d: (
                member.name not in self._held[d],
                sum(self._held[d].values()) - self._memory[d],
            )
        )
        return tuple(free[: member.gpus])

    def lease(self, member: BaselineSession, devices: tuple[DeviceId, ...]) -> bool:
        """Lease free devices to a session; they are granted once there is room.

        Return False, and change nothing, while its own memory is being evicted, or while not enough
        room can be made.
        """
        if member.evicted_from:
            return False
        evictions: list[tuple[SessionId, DeviceId]] = []
        for device in devices:
            found = self._victims(member, device)
            if found is None:
                return False
            evictions += ((name, device) for name in found)
        for device in devices:
            self._holder[device] = member
            held = self._held[device]
            held.pop(member.name, None)
            held[member.name] = member.memory
        member.devices = devices
        member.awaited = set(evictions)
        for name, device in evictions:
            self.members[name].evicted_from.add(device)
            self._decisions.append(Evict(name, device, "host", f"Room for {member.name}."))
        if not evictions:
            self._grant(member)
        return True

    def preempt(self, member: BaselineSession) -> None:
        """Preempt an executing session; idempotent."""
        if member.started is not None and not member.stopping:
            member.stopping = True
            self._decisions.append(Preempt(member.name, member.token, self.reason))

    def executed(self, member: BaselineSession) -> float:
        """Return how long the cell of a session has executed."""
        running = 0.0 if member.started is None else self.now - member.started
        return member.attained + running

    # The engine's interface.

    def handle(self, event: Event) -> Sequence[Decision]:
        """Handle an event and return the decisions."""
        self.now = event.at
        self._decisions = []
        match event:
            case SessionAdded():
                member = BaselineSession(event.session, event.gpus, event.memory)
                self.members[event.session] = member
                self.opened(member)
            case CellSubmitted():
                member = self.members[event.session]
                self._arrivals += 1
                member.has_cell, member.arrival, member.attained = True, self._arrivals, 0.0
                self.submitted(member)
            case Started():
                member = self.members[event.session]
                member.started = self.now
                self._leave(member)
            case CellFinished():
                member = self.members[event.session]
                member.has_cell = False
                self._end(member)
                self.finished(member)
            case Released():
                member = self.members[event.session]
                member.attained = self.executed(member)
                self._end(member)
                self.released(member)
            case Evicted():
                self._evicted(event.session, event.device)
            case SessionRemoved():
                member = self.members.pop(event.session)
                for held in self._held.values():
                    held.pop(member.name, None)
                self.closed(member)
            case Tick():
                pass
            case _:
                raise NotImplementedError(f"A baseline knows no {type(event).__name__}.")
        self.schedule()
        return self._decisions

    def _victims(self, member: BaselineSession, device: DeviceId) -> list[SessionId] | None:
        """Return the sessions to evict to make room; None if that is not enough."""
        held = self._held[device]
        used = sum(size for name, size in held.items() if name != member.name)
        victims = []
        for name, size in held.items():
            if used + member.memory <= self._memory[device]:
                break
            other = self.members[name]
            if other is not member and not other.devices and device not in other.evicted_from:
                victims.append(name)
                used -= size
        return victims if used + member.memory <= self._memory[device] else None

    def _grant(self, member: BaselineSession) -> None:
        self._token += 1
        member.token = self._token
        self._decisions.append(
            Grant(member.name, member.devices, member.token, float("inf"), self.reason)
        )

    def _evicted(self, name: SessionId, device: DeviceId) -> None:
        self.members[name].evicted_from.discard(device)
        self._held[device].pop(name, None)
        holder = self._holder[device]
        if holder is not None and (name, device) in holder.awaited:
            holder.awaited.discard((name, device))
            if not holder.awaited:
                self._grant(holder)

    def _leave(self, member: BaselineSession) -> None:
        """Record that a session that has started is on no other device any more."""
        for device, held in self._held.items():
            if device not in member.devices:
                held.pop(member.name, None)

    def _end(self, member: BaselineSession) -> None:
        self._leave(member)
        for device in member.devices:
            self._holder[device] = None
        member.devices = ()
        member.started, member.stopping = None, False
