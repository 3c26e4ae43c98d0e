"""One lock per device, passed around in turns, and a home that a session never leaves.

After nvshare (Alexopoulos and Mitropoulos, 2024): the holder of a device's lock drops it after a
time quantum and joins the end of the queue again; an idle holder is detected by polling. Devices
are chosen when a session opens, by the number of sessions alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_sing.scheduler.ids import DeviceId
from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.baselines.base import Baseline, BaselineSession


class Nvshare(Baseline):
    """Locks with a time quantum.

    Parameters
    ----------
    devices : sequence of DeviceSpec
    quantum : float
        Seconds after which the lock is dropped, if a session waits.
    poll : float
        Seconds until a holder without work is detected.
    """

    reason = "Its time quantum is over."

    def __init__(
        self, devices: Sequence[DeviceSpec], quantum: float = 30.0, poll: float = 5.0
    ) -> None:
        super().__init__(devices)
        self._quantum, self._poll = quantum, poll
        self._homes: dict[BaselineSession, tuple[DeviceId, ...]] = {}
        self._population = dict.fromkeys(self.order, 0)
        self._queues: dict[DeviceId, list[BaselineSession]] = {device: [] for device in self.order}
        self._until: dict[BaselineSession, float] = {}  # holders of locks: the end of their quantum
        self._idle: dict[BaselineSession, float] = {}  # holders without work: when that is detected
        self._locks: dict[DeviceId, BaselineSession | None] = dict.fromkeys(self.order)

    def opened(self, member: BaselineSession) -> None:
        """Choose the home with the fewest sessions."""
        home = sorted(self.order, key=lambda device: self._population[device])[: member.gpus]
        self._homes[member] = tuple(home)
        for device in home:
            self._population[device] += 1

    def submitted(self, member: BaselineSession) -> None:
        """Request the lock, unless the session still has it."""
        if self._idle.pop(member, None) is None:
            self._enqueue(member)

    def finished(self, member: BaselineSession) -> None:
        """Keep the lock until the idle holder is detected."""
        self._idle[member] = self.now + self._poll

    def released(self, member: BaselineSession) -> None:
        """Join the end of the queue again."""
        self._unlock(member)
        self._enqueue(member)

    def closed(self, member: BaselineSession) -> None:
        """Release everything."""
        self._unlock(member)
        for device in self._homes.pop(member):
            self._population[device] -= 1

    def next_tick(self) -> float | None:
        """Return when the next quantum with a waiter ends, or an idle holder is detected."""
        ends = [until for member, until in self._due() if member.has_cell]
        return min([*ends, *self._idle.values()], default=None)

    def schedule(self) -> None:
        """Revoke locks whose time is over, and give free ones to the first in line."""
        for member in [m for m, noticed in self._idle.items() if noticed <= self.now]:
            self._unlock(member)
        for member, until in self._due():
            if until <= self.now and member.has_cell:
                self.preempt(member)
        for device in self.order:
            if self._queues[device] and self._locks[device] is None:
                self._lock(self._queues[device][0])
        for member in self._until:
            if member.has_cell and not member.devices:
                self.lease(member, self._homes[member])

    def _due(self) -> list[tuple[BaselineSession, float]]:
        """Return the holders for which sessions wait, and when their quantum ends."""
        found = []
        for member, until in self._until.items():
            if member.stopping or not any(self._queues[d] for d in self._homes[member]):
                continue
            if member.started is None and member.has_cell:
                continue  # it is being loaded
            while until < self.now:  # quanta without a waiter
                until += self._quantum
            self._until[member] = until
            found.append((member, until))
        return found

    def _lock(self, member: BaselineSession) -> None:
        """Give a session its locks, if it is the first in line for all of them."""
        home = self._homes[member]
        if all(self._locks[d] is None and self._queues[d][0] is member for d in home):
            for device in home:
                self._locks[device] = member
                self._queues[device].pop(0)
            self._until[member] = self.now + self._quantum

    def _unlock(self, member: BaselineSession) -> None:
        self._idle.pop(member, None)
        if self._until.pop(member, None) is not None:
            for device in self._homes[member]:
                self._locks[device] = None

    def _enqueue(self, member: BaselineSession) -> None:
        for device in self._homes[member]:
            self._queues[device].append(member)
