"""State of sessions and devices in the engine."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from jupyter_sing.scheduler.events import SessionAdded
from jupyter_sing.scheduler.fairness.fair_queue import Flow
from jupyter_sing.scheduler.fairness.mlfq import Gaps, SwapBudget
from jupyter_sing.scheduler.fairness.quotas import Quota
from jupyter_sing.scheduler.fairness.tier_targets import Account, Admission
from jupyter_sing.scheduler.gangs.ranks import per_device, sizes
from jupyter_sing.scheduler.settings import DeviceSpec, Tier


class Phase(Enum):
    """Phase of a session in the life of a lease.

    IDLE -> WAITING at a cell. WAITING -> RESERVED when devices are chosen for it: their lessees
    stop, room is made. RESERVED -> LOADING at `Grant`, -> RUNNING at `Started`. Both -> STOPPING at
    `Preempt`, -> WAITING at `Released`. Any -> IDLE at the end of the cell.
    """

    IDLE = "idle"
    WAITING = "waiting"
    RESERVED = "reserved"
    LOADING = "loading"
    RUNNING = "running"
    STOPPING = "stopping"


HOLDING = (Phase.LOADING, Phase.RUNNING, Phase.STOPPING)


@dataclass(slots=True)
class SessionTerms:
    """Rights of a session.

    Attributes
    ----------
    admission
        Whether the target of its tier is kept for it.
    goal
        Fraction of its device time demand that it was promised; 0 if that cannot be kept.
    """

    tier: Tier
    pinned: bool
    may_pack: bool
    may_preempt: bool
    admission: Admission
    goal: float = 0.0


@dataclass(slots=True)
class SessionWait:
    """Wait of a session for devices.

    Attributes
    ----------
    arrival
        Order of the requests.
    boost
        Levels that it has risen by waiting.
    urgent
        It goes before sessions without a tier target.
    resumes, waited
        Its next cell is one that an earlier engine knew, with this much attained already, and which
        had waited for this many seconds.
    short
        It waits for room within this limit of memory.
    """

    since: float
    arrival: int
    boost: int = 0
    urgent: bool = False
    resumes: bool = False
    waited: float = 0.0
    short: SessionQuota | None = None


@dataclass(slots=True)
class SessionLease:
    """Present or last lease of a session.

    Attributes
    ----------
    devices
        Devices that are granted to it.
    aged
        It holds its lease because it had waited so long.
    right
        Virtual cluster by whose guarantee it holds its devices; empty if it borrows them.
    is_guest
        It shares a device that the guarantees gave to the other session.
    share
        Part of its devices that it is charged for.
    switch
        Seconds that the switch to it has taken.
    protected_until
        End of its minimum run time.
    exposed_at
        When premium sessions may preempt it, if it is a basic one.
    level
        Feedback level at which it executes.
    """

    token: int = 0
    devices: tuple[EngineDevice, ...] = ()
    granted_at: float = 0.0
    run_since: float = 0.0
    aged: bool = False
    right: str = ""
    is_guest: bool = False
    share: float = 1.0
    switch: float = 0.0
    protected_until: float = 0.0
    exposed_at: float = 0.0
    quantum_end: float = 0.0
    level: int = 0


@dataclass(slots=True)
class Residency:
    """Places of a session's memory.

    Attributes
    ----------
    clean_at
        When its memory is copied to the host, unless it executes.
    homes
        Devices on which its memory is: those of its lease, and during a move also the old ones.
    bound
        Device that its worker is bound to; None: it may move.
    pinned_on
        Device that it is pinned to: it is granted only there, until it is unpinned.
    arriving
        Devices of its lease where its memory was not at the grant, and is not yet.
    moving
        Devices that its memory is leaving, and the target of each (None: off all devices). Nothing
        else is done with it until that is answered.
    stays_until
        Its memory could not be evicted or moved; there is no retry until then.
    """

    clean_at: float
    homes: list[EngineDevice] = field(default_factory=list)
    bound: EngineDevice | None = None
    pinned_on: EngineDevice | None = None
    arriving: tuple[EngineDevice, ...] = ()
    moving: dict[EngineDevice, EngineDevice | None] = field(default_factory=dict)
    migrated_at: float = float("-inf")
    stays_until: float = float("-inf")


@dataclass(slots=True)
class SessionUsage:
    """Measurements of a session.

    Attributes
    ----------
    rate_alone
        Steps per second that were measured when it had a device of its own.
    utilisation
        Part of the time between its last two measurements in which it executed.
    """

    measured_at: float
    step_seconds: float | None = None
    nadir: float | None = None
    rate_alone: float | None = None
    utilisation: float = 1.0


@dataclass(slots=True)
class Gang:
    """Properties that only a session has that is the ranks of a job.

    Attributes
    ----------
    rank_memory
        Bytes of one rank.
    least, most
        Devices on which it may execute. Between them, only the `sizes` are used.
    resize, given
        It stops only to continue on this many devices, and not on those that it has `given` to
        others; 0: it does not.
    prepared
        Devices to which it is likely to be resized, as the agent knows.
    places
        Where its memory is, as reported since its present lease was granted; None: as granted.
    cause, shrunk
        Why it has fewer devices than it could use, as a clause, and whether it had more before.
    """

    ranks: int
    least: int
    most: int
    rank_memory: int
    resize: int = 0
    given: tuple[EngineDevice, ...] = ()
    prepared: tuple[EngineDevice, ...] = ()
    places: dict[EngineDevice, int] | None = None
    cause: str = ""
    shrunk: bool = False

    def memory_at(self, devices: int) -> int:
        """Return the bytes on the fullest of this many devices."""
        return self.rank_memory * per_device(self.ranks, devices)

    def sizes(self, memory: float) -> tuple[int, ...]:
        """Return the numbers of devices on which it fits, if each has this much memory.

        If it fits nowhere, this is the largest number.
        """
        all_sizes = sizes(self.ranks, self.least, self.most)
        return tuple(s for s in all_sizes if self.memory_at(s) <= memory) or all_sizes[-1:]


class EngineSession:
    """One session.

    Attributes
    ----------
    number
        Its order of arrival, which breaks all ties.
    gpus
        Devices that it needs at once. Of a gang: that it has, or the fewest while it waits.
    memory
        Bytes that it has on each of them; of a gang, on the fullest.
    gang
        None if it is no gang.
    attained
        Device seconds of the present cell until `SessionLease.run_since`.
    quotas
        Those of its user and of its virtual cluster.
    version, timers
        Numbers of changes: entries of heaps that have an older one are stale.
    """

    __slots__ = (
        "account",
        "attained",
        "flow",
        "gang",
        "gaps",
        "gpus",
        "id",
        "lease",
        "memory",
        "number",
        "phase",
        "quotas",
        "residency",
        "terms",
        "timers",
        "usage",
        "vc",
        "version",
        "wait",
    )

    def __init__(self, event: SessionAdded, number: int, flow: Flow) -> None:
        self.id = event.session
        self.number = number
        self.vc = event.vc
        self.gpus = event.gpus
        self.memory = event.memory
        self.gang: Gang | None = None
        if event.gpus_min is not None:
            ranks = max(event.ranks, event.gpus)
            self.gang = Gang(ranks, event.gpus_min, event.gpus, event.memory)
            self.size_to(event.gpus_min)
        self.flow = flow
        self.account = Account(event.at)
        self.gaps = Gaps(event.at)
        self.quotas: tuple[SessionQuota, SessionQuota] = flow.quotas
        self.phase = Phase.IDLE
        self.attained = 0.0
        self.version = self.timers = 0
        self.terms = SessionTerms(
            event.tier,
            event.pinned,
            event.may_pack,
            event.may_preempt,
            Admission(event.tier, True, ""),
        )
        self.wait = SessionWait(event.at, number)
        self.lease = SessionLease()
        self.residency = Residency(event.at)
        self.usage = SessionUsage(event.at)

    @property
    def only(self) -> EngineDevice | None:
        """Device to which its execution is restricted; None: it may execute on any."""
        return self.residency.pinned_on or self.residency.bound

    @property
    def shape(self) -> int:
        """Devices without which it cannot execute at all."""
        return self.gpus if self.gang is None else self.gang.least

    def size_to(self, devices: int) -> None:
        """Set the number of devices of a gang, which must not hold any; no effect on others."""
        if self.gang is not None:
            self.gpus, self.memory = devices, self.gang.memory_at(devices)

    def attained_at(self, now: float) -> float:
        """Device seconds that the present cell has had until then."""
        running = self.phase in (Phase.RUNNING, Phase.STOPPING)
        return self.attained + (now - self.lease.run_since if running else 0.0)


SessionQuota: TypeAlias = Quota[Flow, EngineSession]


class EngineDevice:
    """One device.

    Attributes
    ----------
    lessees
        Sessions that hold a lease here; two or more only if they are packed.
    incoming
        Session that it is reserved for.
    residents
        Bytes of every session whose memory is here.
    """

    __slots__ = (
        "budget",
        "bytes_per_second",
        "constant_seconds",
        "healthy",
        "id",
        "incoming",
        "lessees",
        "memory",
        "node",
        "number",
        "residents",
        "used",
    )

    def __init__(self, device: DeviceSpec, number: int, swap_share: float) -> None:
        self.id = device.id
        self.number = number
        self.node = device.node
        self.memory = device.memory
        self.bytes_per_second = device.bytes_per_second
        self.constant_seconds = device.constant_seconds
        self.healthy = True
        self.lessees: list[EngineSession] = []
        self.incoming: EngineSession | None = None
        self.residents: dict[EngineSession, int] = {}
        self.used = 0
        self.budget = SwapBudget(swap_share)

    @property
    def is_free(self) -> bool:
        """True if a lease could begin here at once, as far as execution is concerned."""
        return self.healthy and not self.lessees and self.incoming is None

    def transfer(self, size: int) -> float:
        """Seconds to transfer this many bytes to or from this device."""
        return self.constant_seconds + size / self.bytes_per_second if size else 0.0

    def switch(self, session: EngineSession) -> float:
        """Seconds until the session could execute here, not counting room that has to be made.

        Of a gang, some ranks may be here and others not.
        """
        here = self.residents.get(session)
        if here is not None and (session.gang is None or here >= session.memory):
            return 0.0
        return self.constant_seconds + (session.memory - (here or 0)) / self.bytes_per_second

    def put(self, session: EngineSession, size: int) -> None:
        """Set the bytes of a session here, replacing what was counted for it."""
        change = size - self.residents.get(session, 0)
        self.used += change
        self.residents[session] = size
        if change:
            for quota in session.quotas:
                quota.count(session, change)

    def drop(self, session: EngineSession) -> None:
        """Count no bytes for a session here."""
        size = self.residents.pop(session, 0)
        self.used -= size
        if size:
            for quota in session.quotas:
                quota.count(session, -size)


class FreeDevices:
    """Devices on which a lease could begin, ordered by free bytes, and counted per node."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._entries: dict[int, tuple[EngineDevice, int]] = {}
        self.per_node: dict[str, dict[int, EngineDevice]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def update(self, device: EngineDevice) -> None:
        """Insert, remove or reorder a device, by its present state."""
        entry = self._entries.get(device.number)
        size = device.memory - device.used
        if entry is not None:
            if device.is_free and entry[1] == size:
                return
            del self._order[bisect_left(self._order, (entry[1], device.number))]
        if device.is_free:
            insort(self._order, (size, device.number))
            self._entries[device.number] = (device, size)
            if entry is None:
                self.per_node.setdefault(device.node, {})[device.number] = device
        elif entry is not None:
            del self._entries[device.number]
            del self.per_node[device.node][device.number]

    def roomiest(self, count: int) -> Iterator[EngineDevice]:
        """Yield those with most free bytes, most first."""
        for _, number in self._order[: -count - 1 : -1]:
            yield self._entries[number][0]
