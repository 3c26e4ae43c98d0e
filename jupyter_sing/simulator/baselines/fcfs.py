"""Leases for whole cells, first come, first served; no cell is preempted.

After NotebookOS (Carver et al., 2025), without its replicas: there, too, a GPU is bound when a cell
arrives and free when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.baselines.base import Baseline, BaselineSession


class Fcfs(Baseline):
    """First come, first served: the first in the queue is not overtaken."""

    def __init__(self, devices: Sequence[DeviceSpec]) -> None:
        super().__init__(devices)
        self._queue: deque[BaselineSession] = deque()

    def submitted(self, member: BaselineSession) -> None:
        """Append the session to the queue."""
        self._queue.append(member)

    def schedule(self) -> None:
        """Serve the queue from its head, as far as devices are free."""
        while self._queue:
            devices = self.choose(self._queue[0])
            if devices is None or not self.lease(self._queue[0], devices):
                return
            self._queue.popleft()
