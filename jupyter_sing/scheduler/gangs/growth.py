"""Growth of gangs onto devices that have been idle for a while, after Gandiva's grow-shrink.

Source: Xiao et al., "Gandiva: Introspective Cluster Scheduling for Deep Learning", OSDI 2018. There
a job opts in, as its results depend on the number of devices; here they do not.
"""

from __future__ import annotations

import math

from jupyter_sing.scheduler.gangs.job_text import grow_text
from jupyter_sing.scheduler.queue.gangs import allowed
from jupyter_sing.scheduler.queue.issued import IssuedDecisions
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.placement import Placement
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Gang, Phase

#: A growth is announced so many seconds before, and for each rank's memory at such a rate.
PREPARE_SECONDS = 2.0
PREPARE_BYTES_PER_SECOND = 1e8


class Growth:
    """Lets gangs grow. Only gangs cost time here."""

    def __init__(self, timers: Timers, leases: LeaseTable, placement: Placement) -> None:
        self._timers = timers
        self._waiting, self._running = timers.waiting, timers.running
        self._limiter = timers.limiter
        self._table = leases.table
        self._issued: IssuedDecisions = leases.issued
        self._placement = placement
        self._idle: dict[EngineDevice, float] = {}  # free devices, and since when
        self._tick = -math.inf

    def review(self, now: float) -> None:
        """Let gangs grow whose time has come, and request a tick for the next one."""
        if not self._running.gangs():
            self._idle.clear()
            return
        free = [each for devices in self._table.free.per_node.values() for each in devices.values()]
        self._idle = {device: self._idle.get(device, now) for device in free}
        if not free or self._is_wanted(now):
            return
        gangs = [each for each in self._running.gangs() if self._lacks(each)]
        for session in sorted(gangs, key=lambda each: (each.gpus, each.flow.at(now), each.number)):
            if session.gang is not None:
                self._review(session, session.gang, now)

    def _lacks(self, session: EngineSession) -> bool:
        gang = session.gang
        assert gang is not None
        return session.phase is Phase.RUNNING and session.gpus < self._most(gang)

    def _most(self, gang: Gang) -> int:
        return gang.sizes(self._table.largest)[-1]

    def _is_wanted(self, now: float) -> bool:
        """True if a session waits that could use any device as soon as it is free."""
        return any(
            session.only is None and not self._limiter.holds_back(session, now)
            for session in self._waiting.sessions()
        )

    def _review(self, session: EngineSession, gang: Gang, now: float) -> None:
        pause = self._timers.settings.grow_after
        found = self._larger(session, gang, now) if pause < math.inf else None
        if found is None or self._limiter.has_ended(session, now):
            return
        size, more = found
        at = max(session.lease.protected_until, *(self._idle[each] + pause for each in more))
        reason = grow_text(gang.ranks, session.gpus, size, pause)
        if at > now:
            prepares = at - PREPARE_SECONDS - gang.rank_memory / PREPARE_BYTES_PER_SECOND
            if prepares <= now:
                self._issued.prepare(session, (*session.lease.devices, *more), reason)
            self._wake(at if prepares <= now else prepares, now)
            return
        self._running.remove(session)
        for device in more:
            del self._idle[device]
        self._issued.resize(session, size, reason, now, self._nadir(session))

    def _nadir(self, session: EngineSession) -> float:
        """Return the seconds that a gang may take to reach the memory nadir of its step.

        No session waits for its growth. Less has to be moved there, and its ranks have finished
        equal parts of their step.
        """
        seconds = session.usage.step_seconds
        return seconds if seconds and seconds <= self._timers.settings.nadir_wait else 0.0

    def _wake(self, at: float, now: float) -> None:
        """Request a tick for this time, unless there is an earlier one."""
        if not now < self._tick <= at:
            self._tick = at
            self._timers.request_tick(at)

    def _larger(
        self, session: EngineSession, gang: Gang, now: float
    ) -> tuple[int, list[EngineDevice]] | None:
        """Return the next size, and the devices idle longest that would be added for it.

        Memory of idle sessions is evicted for that only as for a long cell.
        """
        node = session.lease.devices[0].node
        idle = sorted(
            (d for d in self._table.nodes[node] if d in self._idle), key=self._idle.__getitem__
        )
        for size in gang.sizes(self._table.largest):
            if size <= session.gpus:
                continue
            if size > allowed(session):
                return None
            need = gang.memory_at(size)
            fitting = [d for d in idle if self._placement.spares(session, d, need, now)]
            more = fitting[: size - session.gpus]
            return (size, more) if len(more) == size - session.gpus else None
        return None
