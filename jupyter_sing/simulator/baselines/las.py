"""Least attained service in two queues, decided anew in rounds.

After Tiresias (Gu et al., NSDI 2019), whose job is a cell here: a cell that has had less than a
threshold of device-seconds goes before all that have had more; within a queue, first come, first
served. Cells are preempted only between rounds; during a round, free devices are leased.
"""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.baselines.base import Baseline, BaselineSession


class Las(Baseline):
    """Two-queue least attained service.

    Parameters
    ----------
    devices : sequence of DeviceSpec
    threshold : float
        Device-seconds after which a cell is in the second queue.
    round_seconds : float
    """

    reason = "Another cell has had less."

    def __init__(
        self, devices: Sequence[DeviceSpec], threshold: float = 3200.0, round_seconds: float = 60.0
    ) -> None:
        super().__init__(devices)
        self._threshold, self._round = threshold, round_seconds
        self._active: dict[BaselineSession, None] = {}  # with a cell, in the order of arrival
        self._chosen: set[BaselineSession] = set()  # of the last round, only tested for membership
        self._next = round_seconds

    def submitted(self, member: BaselineSession) -> None:
        """Add a session with a cell."""
        if self.now > self._next:  # no session waited at the borders in between
            self._next = (self.now // self._round + 1) * self._round
        self._active[member] = None

    def finished(self, member: BaselineSession) -> None:
        """Remove a session without a cell."""
        del self._active[member]
        self._chosen.discard(member)

    def next_tick(self) -> float | None:
        """Return the next round, while any session waits."""
        waiting = any(not member.devices for member in self._active)
        return self._next if waiting else None

    def schedule(self) -> None:
        """Choose executing sessions at the border of a round; else lease free devices only."""
        ranked = sorted(self._active, key=self._rank)
        if self.now >= self._next:
            self._next = (self.now // self._round + 1) * self._round
            self._choose_round(ranked)
        spare = len(self.free())
        for member in ranked:
            if member.devices:
                continue
            if member in self._chosen or member.gpus <= spare:
                devices = self.choose(member)
                if devices is not None:
                    self.lease(member, devices)
                spare -= member.gpus

    def _choose_round(self, ranked: Sequence[BaselineSession]) -> None:
        left = len(self.order)
        self._chosen = set()
        for member in ranked:
            if member.gpus <= left:
                left -= member.gpus
                self._chosen.add(member)
        for member in ranked:
            if member not in self._chosen:
                self.preempt(member)

    def _rank(self, member: BaselineSession) -> tuple[bool, int]:
        return self.executed(member) * member.gpus >= self._threshold, member.arrival
