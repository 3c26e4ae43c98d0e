"""Placement of gangs: sessions that need several devices of one node at once.

All that is special about them in the queue is here: the order of their searches and their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    ) -> None:
        self._nodes = nodes
        self._free = free
        self._refusals = refusals
        self._stoppable = stoppable
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
