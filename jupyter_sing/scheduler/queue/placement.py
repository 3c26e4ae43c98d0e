"""Placement: the devices of a session, by the least expected wait plus switch.

Its home, where its memory is, costs nothing. A short cell therefore preempts at home even if
another device is free: the long cell that it displaces pays the move. Several devices are taken on
one node, if possible. Ties go to the node whose free devices would be least broken up, after Weng
et al., "Beware of Fragmentation" (FGD, ATC 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_sing.scheduler.queue.gangs import GangPlacement, fragmentation, remaining
from jupyter_sing.scheduler.queue.preemption import RunningSessions, behind
from jupyter_sing.scheduler.queue.residency import room
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE, LEVELS
from jupyter_sing.scheduler.refusals import Refusals
from jupyter_sing.scheduler.state import (
    EngineDevice,
    EngineSession,
    FreeDevices,
    Phase,
    SessionQuota,
)

CANDIDATES = 16
"""Number of devices that are compared."""

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


class Placement:
    """Chooses devices; changes no sessions or devices."""

    def __init__(
        self,
        nodes: Mapping[str, list[EngineDevice]],
        free: FreeDevices,
        running: RunningSessions,
        refusals: Refusals,
    ) -> None:
        self._free = free
        self._running = running
        self._refusals = refusals
        self.gangs = GangPlacement(nodes, free, refusals, self._stoppable, running.may_preempt)
        self.cramped = False  # the last choice failed for lack of memory, not of devices

    def choose(
        self, session: EngineSession, level: int, now: float
    ) -> PlacementChoice | Later | None:
        """Return devices for a waiting session; None if it can only wait."""
        self.cramped = False
        if session.gpus > 1:
            choice = self._gang(session, level, now)
            self.cramped = self.cramped or self.gangs.cramped
            return choice
        if session.only is not None:
            return self._bound(session, level, session.only, now)
        home = session.residency.homes[0] if session.residency.homes else None
        if home is not None and self._is_free(session, home, now):
            return PlacementChoice((home,), (), "its memory is there")
        at_home = self._at_home(session, level, home, now)
        if at_home is not None and level <= 1:
            return at_home
        free, held = self._cheapest(session, level, now)
        home_wait = self._home_wait(session, level, home, now)
        if free is not None:
            cost = free.switch(session)
            if home_wait is not None and home_wait < cost:
                return Later(now + max(WAIT_MIN, home_wait))
            return PlacementChoice((free,), (), "the device is free")
        if at_home is not None:
            return at_home
        device = self._shared_out(session, level, now)
        if device is None:
            lag = self._lag(session, home, now)
            victim = self._running.find(
                session, level, now, lambda v: self._cost(session, level, v, now, lag)
            )
            if victim is None:
                return None if held is None else Later(held)
            device = victim.lease.devices[0]
        if home_wait is not None and home_wait < device.switch(session):
            return Later(now + max(WAIT_MIN, home_wait))
        return PlacementChoice((device,), tuple(device.lessees), "it goes before what runs there")

    def _shared_out(self, session: EngineSession, level: int, now: float) -> EngineDevice | None:
        """Return the cheapest device that a gang has beyond what it needs, and must give back."""
        best: tuple[float, int] | None = None
        chosen = None
        for victim in self._running.gangs():
            for device in victim.lease.devices if victim.gpus > 1 else ():
                victims = self._stoppable(session, level, device, now)
                if victims is None or not remaining(victim, (device,), now):
                    continue
                made = room(session, device, now, leaving=victims)
                if made is None:
                    self.cramped = True
                    continue
                key = (round(made.seconds + device.switch(session), 3), -device.number)
                if best is None or key < best:
                    best, chosen = key, device
        return chosen

    def _gang(
        self,
        session: EngineSession,
        level: int,
        now: float,
        gone: tuple[EngineSession, ...] = (),
        reason: str = "",
    ) -> PlacementChoice | None:
        found = self.gangs.choose(session, level, now, gone)
        if found is None:
            return None
        devices, victims = found
        default = f"{session.gpus} devices of {devices[0].node}"
        return PlacementChoice(devices, victims, reason or default)

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
            return self._gang(session, level, now, gone, reason)
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
            if self._running.may_preempt(session, level, victim, now):
                continue
            gives = victim.gang is not None and remaining(victim, (device,), now) > 0
            if not gives or not self._running.may_shrink(session, level, victim, now):
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

    def _home_wait(
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
            broken = fragmentation(count - 1, self.gangs.shapes) - fragmentation(
                count, self.gangs.shapes
            )
            cost = device.switch(session) + made.seconds
            key = (round(cost, 3), broken, device.used, device.number)
            if best is None or key < best:
                best, chosen = key, device
        return chosen, held if chosen is None else None

    def spares(self, session: EngineSession, device: EngineDevice, need: int, now: float) -> bool:
        """True if a free device has room for a gang that could do without, as for a long cell."""
        if self._refusals.holds(session, device, now):
            return False
        made = room(session, device, now, need=need)
        return made is not None and self._kept_free(session, LEVELS, device, made.victims) <= now

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
