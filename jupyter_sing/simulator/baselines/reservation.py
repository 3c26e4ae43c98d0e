"""Devices that belong to a session for its life, or until it was idle for too long.

The first is what a hub without a scheduler does, the second what JupyterHub's and Colab's cullers
do. A culled session keeps its state here, while a real one loses it: it only has to queue again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jupyter_sing.scheduler.ids import DeviceId
from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.baselines.base import Baseline, BaselineSession


class ReservationBaseline(Baseline):
    """Sessions are admitted first come, first served.

    Parameters
    ----------
    devices : sequence of DeviceSpec
    cull : float, optional
        Seconds without a cell after which a session's devices are given to others. Without it,
        they are given to others when the session closes.
    """

    def __init__(self, devices: Sequence[DeviceSpec], cull: float | None = None) -> None:
        super().__init__(devices)
        self._cull = cull
        self._queue: deque[BaselineSession] = deque()
        self._owned: dict[BaselineSession, tuple[DeviceId, ...]] = {}
        self._idle: dict[BaselineSession, float] = {}  # since when; the longest idle first
        self._unowned = list(self.order)

    def submitted(self, member: BaselineSession) -> None:
        """Use the devices that it owns, or queue for admission."""
        self._idle.pop(member, None)
        if member not in self._owned:
            self._queue.append(member)

    def finished(self, member: BaselineSession) -> None:
        """Record that a session is idle."""
        self._idle[member] = self.now

    def closed(self, member: BaselineSession) -> None:
        """Release its devices."""
        self._idle.pop(member, None)
        self._disown(member)

    def next_tick(self) -> float | None:
        """Return when the session that is idle for longest is culled."""
        if self._cull is None or not self._idle:
            return None
        return next(iter(self._idle.values())) + self._cull

    def schedule(self) -> None:
        """Cull, admit, and lease to those that have devices and a cell."""
        if self._cull is not None:
            for member in [m for m, since in self._idle.items() if since + self._cull <= self.now]:
                del self._idle[member]
                self._disown(member)
        while self._queue and len(self._unowned) >= self._queue[0].gpus:
            member = self._queue.popleft()
            self._owned[member] = tuple(self._unowned[: member.gpus])
            del self._unowned[: member.gpus]
        for member, devices in self._owned.items():
            if member.has_cell and not member.devices:
                self.lease(member, devices)

    def _disown(self, member: BaselineSession) -> None:
        self._unowned += self._owned.pop(member, ())
