"""Placement: the devices of a session, by the least expected wait plus switch.

Its home, where its memory is, costs nothing. A short cell therefore preempts at home even if
another device is free: the long cell that it displaces pays the move. Several devices are taken on
one node, if possible. Ties go to the node whose free devices would be least broken up, after Weng
et al., "Beware of Fragmentation" (FGD, ATC 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_sing.scheduler.queue.preemption import RunningSessions, behind
from jupyter_sing.scheduler.queue.refusals import Refusals
from jupyter_sing.scheduler.queue.residency import room
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE
from jupyter_sing.scheduler.state import (
    EngineDevice,
    EngineSession,
    FreeDevices,
    Phase,
    SessionQuota,
)

CANDIDATES = 16
"""Number of devices, or nodes, that are compared."""

WAIT_MIN = 0.05

NOTICED = 0.9
"""Seconds of loading from which a user notices the wait and loses concentration."""

ANTICIPATION_MAX = 50.0
"""Longest time for which a device is kept free for a cell that is expected."""


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """Devices to take, and the sessions that have to stop for that."""

    devices: tuple[EngineDevice, ...]
    victims: tuple[EngineSession, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Later:
    """Waiting for its home until then is likely cheaper than moving."""

    at: float


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


class Placement:
    """Chooses devices; changes no sessions or devices."""

    def __init__(
        self,
        nodes: Mapping[str, list[EngineDevice]],
        free: FreeDevices,
        running: RunningSessions,
        refusals: Refusals,
    ) -> None:
        self._nodes = nodes
        self._free = free
        self._running = running
        self._refusals = refusals
        self.shapes: dict[int, int] = {}
        self.cramped = False  # the last choice failed for lack of memory, not of devices

    def choose(
        self, session: EngineSession, level: int, now: float
    ) -> PlacementChoice | Later | None:
        """Return devices for a waiting session; None if it can only wait."""
        self.cramped = False
        if session.gpus > 1:
            return self._several(session, level, now)
        if session.only is not None:
            return self._bound(session, level, session.only, now)
        home = session.residency.homes[0] if session.residency.homes else None
        if home is not None and self._is_free(session, home, now):
            return PlacementChoice((home,), (), "its memory is there")
        at_home = self._at_home(session, level, home, now)
        if at_home is not None and level <= 1:
            return at_home
        free, held = self._cheapest(session, level, now)
        patience = self._patience(session, level, home, now)
        if free is not None:
            cost = free.switch(session)
            if patience is not None and patience < cost:
                return Later(now + max(WAIT_MIN, patience))
            return PlacementChoice((free,), (), "the device is free")
        if at_home is not None:
            return at_home
        lag = self._lag(session, home, now)
        victim = self._running.find(
            session, level, now, lambda v: self._cost(session, level, v, now, lag)
        )
        if victim is None:
            return None if held is None else Later(held)
        device = victim.lease.devices[0]
        if patience is not None and patience < device.switch(session):
            return Later(now + max(WAIT_MIN, patience))
        return PlacementChoice((device,), tuple(device.lessees), "it goes before what runs there")

    def swap(
        self, session: EngineSession, level: int, quota: SessionQuota, now: float
    ) -> PlacementChoice | None:
        """Return devices for a session at a limit: other sessions of its user or cluster stop."""
        lacking = quota.taken + session.gpus - int(quota.limits.devices)
        gone = self._running.within(session, level, quota, lacking, now)
        if not gone:
            return None
        reason = f"it takes the place of another session of {quota.whose}"
        if session.gpus > 1:
            choice = self._several(session, level, now, gone)
            return choice and PlacementChoice(choice.devices, choice.victims, reason)
        freed = [
            device
            for victim in gone
            for device in victim.lease.devices
            if device.incoming is None
            and device.healthy
            and all(lessee in gone for lessee in device.lessees)
        ]
        if session.residency.bound is not None:
            candidates = [session.residency.bound]
        else:
            candidates = [*session.residency.homes[:1], *freed, *self._free.roomiest(1)]
        for device in candidates:
            if self._refusals.holds(session, device, now):
                continue
            if device in freed or device.is_free:
                victims = gone
            else:
                others = self._stoppable(session, level, device, now)
                if session.residency.bound is None or others is None:
                    continue
                victims = tuple(dict.fromkeys([*gone, *others]))
            if room(session, device, now, leaving=victims) is not None:
                return PlacementChoice((device,), victims, reason)
        return None

    def _bound(
        self, session: EngineSession, level: int, device: EngineDevice, now: float
    ) -> PlacementChoice | None:
        """Choose the only device that it can use; that it is taken says nothing about others."""
        self.cramped = True
        if self._is_free(session, device, now):
            pinned = device is session.residency.pinned_on
            why = "it is pinned to it" if pinned else "it is the device that was asked for"
            return PlacementChoice((device,), (), why)
        return self._at_home(session, level, device, now)

    def _lag(self, session: EngineSession, home: EngineDevice | None, now: float) -> float:
        """Return by how much a session has to be behind one elsewhere to preempt it, in seconds.

        A session that takes turns with others at home moves when it misses its share, not for a
        single quantum: if every session moved to wherever a quantum ends first, all would get the
        same service, and move each time. The value is at most what the cell has attained, so that a
        cell with little service does not wait long at home.
        """
        if home is None or not home.healthy or self._refusals.holds(session, home, now):
            return 0.0
        holder = home.incoming or next(iter(home.lessees), None)
        if holder is None or not self._running.is_reachable(session, holder):
            return 0.0
        if not holder.terms.may_preempt or holder.terms.tier is not session.terms.tier:
            return 0.0
        return min(self._running.settings.move_lag, session.attained_at(now))

    def _is_free(self, session: EngineSession, device: EngineDevice, now: float) -> bool:
        """True if a device is free for a session, and has room for it or can make it."""
        return (
            device.is_free
            and not self._refusals.holds(session, device, now)
            and room(session, device, now) is not None
        )

    def _cost(
        self,
        session: EngineSession,
        level: int,
        victim: EngineSession,
        now: float,
        lag: float = 0.0,
    ) -> float | None:
        device = victim.lease.devices[0]
        alike = victim.terms.tier is session.terms.tier and victim.lease.level <= max(
            level, INTERACTIVE
        )
        if lag and alike and behind(session, victim, now) < lag:
            return None
        victims = self._stoppable(session, level, device, now)
        if victims is None:
            return None
        made = room(session, device, now, leaving=victims)
        if made is None:
            self.cramped = True
            return None
        return made.seconds + device.switch(session)

    def _stoppable(
        self, session: EngineSession, level: int, device: EngineDevice, now: float
    ) -> tuple[EngineSession, ...] | None:
        """Return all sessions that execute on a device, if the session goes before each of them."""
        if not device.lessees or device.incoming is not None or not device.healthy:
            return None
        if self._refusals.holds(session, device, now):
            self.cramped = True
            return None
        for victim in device.lessees:
            if not self._running.may_preempt(session, level, victim, now):
                return None
        return tuple(device.lessees)

    def _at_home(
        self, session: EngineSession, level: int, home: EngineDevice | None, now: float
    ) -> PlacementChoice | None:
        """Choose its home, preempting the sessions that execute there."""
        if home is None:
            return None
        victims = self._stoppable(session, level, home, now)
        if victims is None or room(session, home, now, leaving=victims) is None:
            return None
        return PlacementChoice(
            (home,), victims, "its memory is there, and it goes before what runs there"
        )

    def _patience(
        self, session: EngineSession, level: int, home: EngineDevice | None, now: float
    ) -> float | None:
        """Return the seconds until its home is likely to be free; None if waiting is pointless.

        A cell is expected to last as long again as it has lasted, as heavy-tailed ones do.
        """
        if home is None or not home.healthy or home.incoming is not None or not home.lessees:
            return None
        holder = home.lessees[0]
        if self._refusals.holds(session, home, now):
            return None
        if holder.phase is not Phase.RUNNING or not self._running.is_reachable(session, holder):
            return None
        protected = max(0.0, holder.lease.protected_until - now)
        if level < holder.lease.level:
            wait = protected
        else:
            left = max(protected, holder.lease.quantum_end - now)
            wait = min(left, max(0.5, holder.attained_at(now)))
        # A session that has waited for as long as the move takes does not wait any longer for its
        # home.
        return wait if now - session.wait.since + wait < home.transfer(session.memory) else None

    def _cheapest(
        self, session: EngineSession, level: int, now: float
    ) -> tuple[EngineDevice | None, float | None]:
        """Return the free device with the least switch, room to be made included.

        If all that suit are kept free for others, return when the first of them will not be.
        """
        held: float | None = None
        best: tuple[float, float, int, int] | None = None
        chosen: EngineDevice | None = None
        for device in self._free.roomiest(CANDIDATES):
            held_back = self._refusals.holds(session, device, now)
            made = None if held_back else room(session, device, now)
            if made is None:
                self.cramped = True
                continue
            until = self._kept_free(session, level, device, made.victims)
            if until > now:
                held = until if held is None else min(held, until)
                continue
            count = len(self._free.per_node[device.node])
            broken = fragmentation(count - 1, self.shapes) - fragmentation(count, self.shapes)
            cost = device.switch(session) + made.seconds
            key = (round(cost, 3), broken, device.used, device.number)
            if best is None or key < best:
                best, chosen = key, device
        return chosen, held if chosen is None else None

    def _kept_free(
        self,
        session: EngineSession,
        level: int,
        device: EngineDevice,
        victims: tuple[EngineSession, ...],
    ) -> float:
        """Return until when a device is kept free for the next cells of its idle residents.

        A long cell does not evict a session whose reload its user would notice, while the next cell
        of that session is likely to come soon: that would cost both sessions a load.
        """
        if level <= INTERACTIVE or session.wait.urgent:
            return 0.0
        return max(
            (
                min(each.gaps.expected(), each.gaps.since + ANTICIPATION_MAX)
                for each in victims
                if each.phase is Phase.IDLE and device.transfer(each.memory) > NOTICED
            ),
            default=0.0,
        )

    def _several(
        self, session: EngineSession, level: int, now: float, gone: tuple[EngineSession, ...] = ()
    ) -> PlacementChoice | None:
        """Choose devices of one node, with the fewest victims; `gone` sessions stop anyway."""
        wanted = session.gpus
        best: tuple[int, float, float, int] | None = None
        chosen: PlacementChoice | None = None
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
                chosen = PlacementChoice(
                    tuple(device for *_, device in picked), victims, f"{wanted} devices of {node}"
                )
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
