"""Placement of sessions that need several devices of one node at once, and of gangs.

All that is special about them in the queue is here: the order of their searches and their places.
When a gang grows is decided in `gangs/growth.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from jupyter_sing.scheduler.queue.residency import room
from jupyter_sing.scheduler.refusals import Refusals
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, FreeDevices

SEARCH_PAUSE = 0.2
"""Seconds between two searches for several devices at once that found none."""

CANDIDATES = 16
"""Number of nodes that are compared."""


def fragmentation(free: int, shapes: Mapping[int, int]) -> float:
    """Return the number of free devices of a node that an average session cannot use.

    Parameters
    ----------
    free
        Free devices of the node.
    shapes
        Sessions by the number of devices that they need at once.
    """
    total = sum(shapes.values())
    useless = sum(count * free for gpus, count in shapes.items() if gpus > free)
    return useless / total if total else 0.0


def remaining(
    session: EngineSession, taken: Collection[EngineDevice], now: float, most: float = math.inf
) -> int:
    """Return on how many of its devices a gang could continue without these; 0: on none.

    Its ranks need room on those that are left. `most` is the most that it may have.
    """
    gang = session.gang
    if gang is None:
        return 0
    kept = [d for d in session.lease.devices if d not in taken and d.healthy and not d.incoming]
    for size in reversed(gang.sizes(max((d.memory for d in kept), default=0))):
        need = gang.memory_at(size)
        if size < session.gpus and size <= min(most, _fitting(session, kept, need, now)):
            return size
    return 0


def _fitting(session: EngineSession, devices: Iterable[EngineDevice], need: int, now: float) -> int:
    return sum(room(session, device, now, need=need) is not None for device in devices)


def allowed(session: EngineSession) -> float:
    """Return the most devices that the limits of its user and virtual cluster leave to a gang."""
    held = session.gpus
    return min(
        quota.limits.devices - quota.taken + (held if session in quota.holders else 0)
        for quota in session.quotas
    )


class GangPlacement:
    """Chooses several devices of one node; changes no sessions or devices.

    Attributes
    ----------
    shapes
        Sessions by the number of devices that they need at once.
    cramped
        The last choice failed for lack of memory, not of devices.
    """

    def __init__(
        self,
        nodes: Mapping[str, list[EngineDevice]],
        free: FreeDevices,
        refusals: Refusals,
        stoppable: Callable[
            [EngineSession, int, EngineDevice, float], tuple[EngineSession, ...] | None
        ],
        may_preempt: Callable[[EngineSession, int, EngineSession, float], bool],
    ) -> None:
        self._nodes = nodes
        self._free = free
        self._refusals = refusals
        self._stoppable = stoppable
        self._may_preempt = may_preempt
        self.shapes: dict[int, int] = {}
        self.cramped = False
        self._next_search = float("-inf")

    def is_paused(self, session: EngineSession, now: float) -> bool:
        """True if a session is a gang, and a search for devices has failed just now."""
        return session.gpus > 1 and now < self._next_search

    def note_failure(self, session: EngineSession, now: float) -> float | None:
        """Record a search that found nothing; return when the next one may be, for gangs."""
        if session.gpus == 1:
            return None
        self._next_search = now + SEARCH_PAUSE
        return self._next_search

    def idle(
        self,
        session: EngineSession,
        most: float,
        now: float,
        avoid: Collection[EngineDevice] = (),
    ) -> tuple[EngineDevice, ...] | None:
        """Choose free devices of one node for a gang: as many as suit, at most `most`."""
        assert session.gang is not None
        largest = max((d.memory for devices in self._nodes.values() for d in devices), default=0)
        for size in reversed(session.gang.sizes(largest)):
            if size > most:
                continue
            need = session.gang.memory_at(size)
            best: tuple[float, tuple[EngineDevice, ...]] | None = None
            for free in self._free.per_node.values():
                ranked = []
                for device in free.values() if len(free) >= size else ():
                    if device in avoid or self._refusals.holds(session, device, now):
                        continue
                    made = room(session, device, now, need=need)
                    if made is not None:
                        missing = need - device.residents.get(session, 0)
                        cost = device.transfer(max(0, missing)) + made.seconds
                        ranked.append((cost, device.number, device))
                ranked.sort()
                if len(ranked) >= size:
                    cost = sum(each for each, *_ in ranked[:size])
                    if best is None or cost < best[0]:
                        best = cost, tuple(device for *_, device in ranked[:size])
            if best is not None:
                return best[1]
        return None

    def choose(
        self, session: EngineSession, level: int, now: float, gone: tuple[EngineSession, ...] = ()
    ) -> tuple[tuple[EngineDevice, ...], tuple[EngineSession, ...]] | None:
        """Choose devices of one node, with the fewest victims; `gone` sessions stop anyway.

        Returns
        -------
        tuple or None
            The devices and the victims.
        """
        self.cramped = False
        wanted = session.gpus
        best: tuple[int, float, float, int] | None = None
        chosen = None
        order = sorted(self._nodes, key=lambda node: -len(self._free.per_node.get(node, ())))
        for position, node in enumerate(order[:CANDIDATES]):
            picked: list[tuple[int, float, int, EngineDevice]] = []
            for device in self._nodes[node]:
                ranked = self._rank(session, level, device, now, gone)
                if ranked is not None:
                    picked.append((*ranked, device.number, device))
            if len(picked) < wanted:
                continue
            picked.sort()
            picked = picked[:wanted]
            victims = tuple(
                dict.fromkeys(
                    [*gone, *(other for *_, device in picked for other in device.lessees)]
                )
            )
            if not self._may_all_go(session, level, victims, [d for *_, d in picked], now):
                continue
            count = len(self._free.per_node.get(node, ()))
            key = (
                len(victims),
                sum(cost for _, cost, *_ in picked),
                fragmentation(max(0, count - wanted), self.shapes),
                position,
            )
            if best is None or key < best:
                best = key
                chosen = tuple(device for *_, device in picked), victims
        return chosen

    def _may_all_go(
        self,
        session: EngineSession,
        level: int,
        victims: Iterable[EngineSession],
        taken: Collection[EngineDevice],
        now: float,
    ) -> bool:
        """True if no gang loses all of its devices that only has to do with fewer."""
        return all(
            victim.gang is None
            or remaining(victim, taken, now) > 0
            or self._may_preempt(session, level, victim, now)
            for victim in victims
        )

    def _rank(
        self,
        session: EngineSession,
        level: int,
        device: EngineDevice,
        now: float,
        gone: tuple[EngineSession, ...],
    ) -> tuple[int, float] | None:
        if self._refusals.holds(session, device, now):
            self.cramped = True
            return None
        freed = device.incoming is None and device.healthy
        if freed and all(lessee in gone for lessee in device.lessees):
            made = room(session, device, now, leaving=gone)
            return None if made is None else (0, device.switch(session) + made.seconds)
        victims = self._stoppable(session, level, device, now)
        if victims is None:
            return None
        made = room(session, device, now, leaving=victims)
        return None if made is None else (1, device.switch(session) + made.seconds)
