"""State of a simulation: virtual time with what is due, the devices, and the sessions on them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.gangs.ranks import per_device
from jupyter_sing.scheduler.ids import DeviceId
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulatedDevices
from jupyter_sing.simulator.outcome import SessionRecord, SimulationOutcome
from jupyter_sing.simulator.workload import SimulatedSession


@dataclass
class SessionRun:
    """State of a session on its way through its cells."""

    session: SimulatedSession
    record: SessionRecord
    index: int = 0
    waiting: bool = False  # has a cell that is not finished
    remaining: float = 0.0
    submitted: float = 0.0
    first_started: float | None = None
    token: int | None = None  # of the lease that it has
    devices: tuple[DeviceId, ...] = ()
    granted: float = 0.0
    started: float | None = None  # when it began to execute under that lease
    stopping: bool = False
    leaving: tuple[DeviceId, ...] = ()  # where its memory is free once it has started
    resident: dict[DeviceId, float] = field(default_factory=dict)  # since when it is not executing
    evicting: set[DeviceId] = field(default_factory=set)
    loaded: bool = False  # was on a device before
    cold: bool = False  # its memory is on disk
    demand_at_open: float = 0.0

    @property
    def slowness(self) -> int:
        """Ranks that share the fullest of its devices, and take turns there."""
        return per_device(self.session.gpus, len(self.devices)) if self.devices else 1

    @property
    def size(self) -> int:
        """Bytes that it holds on each of the devices of its lease."""
        return self.session.memory * self.slowness


class SimulatedWorld:
    """Virtual time, the devices, and the records of what happens.

    Parameters
    ----------
    cluster : SimulatedCluster
    devices : SimulatedDevices
    notify : callable
        Sends an event to the scheduler, and carries out its decisions.

    Attributes
    ----------
    now
        Seconds since the simulation began.
    demand
        Devices that the unfinished cells need.
    demand_seconds
        Its integral.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        devices: SimulatedDevices,
        notify: Callable[[Event], None],
    ) -> None:
        self.cluster, self.devices, self.notify = cluster, devices, notify
        self.outcome = SimulationOutcome(cluster.gpus)
        self.now = 0.0
        self.demand, self.demand_seconds = 0, 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    @property
    def next_due(self) -> float | None:
        """Time of the next call that is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, at: float, do: Callable[[], None]) -> None:
        """Call something at a time; calls for the same time are made in the order of this."""
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, do))

    def step(self) -> None:
        """Advance to the next call that is due, and make it."""
        at, _, do = heapq.heappop(self._heap)
        self.advance(at)
        do()

    def advance(self, at: float) -> None:
        """Let time pass."""
        passed = at - self.now
        if passed > 0:
            self.demand_seconds += passed * self.demand
            self.outcome.fragmented += passed * self.devices.fragmented
            self.now = at
