"""Forecast of when waiting sessions are granted devices, and which ones.

It simulates the sessions in the order in which they are served. Each gets the device that is likely
to be available soonest: a free one at once, another one when its holder gives way
(`preemption_forecast.py`). From then on it holds the device for a quantum, or for the duration of
its cell, and the session that was stopped for it waits again. Sessions that may arrive meanwhile
are unknown and left out, as is sharing.

A forecast changes nothing that decisions depend on. It takes time in proportion to the number of
waiting sessions. Only user requests cause it, never decisions.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jupyter_sing.scheduler.explain.preemption_forecast import (
    ExpectedLease,
    WaitingRequest,
    gives_way,
)
from jupyter_sing.scheduler.fairness.mlfq import AGING, level_of, run_min, turn_of
from jupyter_sing.scheduler.fairness.tier_targets import threshold
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.residency import room
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE, Key
from jupyter_sing.scheduler.settings import EngineSettings
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Phase

CANDIDATES = 16
"""Devices that are compared for a waiting session."""

ROUNDS = 3
"""How often every waiting session is stopped and waits again, at most, before a forecast ends."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds until a session is likely to be granted these devices; None and empty if unknown."""

    seconds: float | None = None
    devices: tuple[EngineDevice, ...] = ()


@dataclass(slots=True, eq=False)
class _Place:
    """A device, and the lease that holds it or will hold it; None if it is free."""

    device: EngineDevice
    turn: ExpectedLease | None
    order: tuple[float, int]  # about when it is free, for any session


_Chosen: TypeAlias = tuple[float, tuple[EngineDevice, ...]]
_Entry: TypeAlias = tuple[Key, int, WaitingRequest, float]  # the last: not before then


class Forecast:
    """One forecast.

    Parameters
    ----------
    typical
        Seconds that a cell is expected to last if nothing is known about it. One that has lasted
        for longer is expected to last as long again, as heavy-tailed ones do.
    devices
        Those that may be granted.
    """

    def __init__(
        self,
        timers: Timers,
        leases: LeaseTable,
        typical: float,
        devices: Iterable[EngineDevice],
        now: float,
    ) -> None:
        self._timers = timers
        self._leases = leases
        self._nodes = leases.table.nodes
        self._typical = typical
        self._now = now
        self._places: dict[EngineDevice, _Place] = {}
        self._soonest: list[_Place] = []
        for device in devices:
            if device.healthy:
                self._occupy(device, self._present(device))

    @property
    def _settings(self) -> EngineSettings:
        return self._timers.settings

    def run(self, order: Sequence[tuple[Key, EngineSession]]) -> dict[EngineSession, Expected]:
        """Serve all waiting sessions, in their order."""
        found: dict[EngineSession, Expected] = {}
        queue: list[_Entry] = []
        for number, (key, session) in enumerate(order):
            leaving = (device.transfer(session.memory) for device in session.residency.moving)
            tried_again = self._leases.table.tried_again(session, self._now)
            since = max(self._now + max(leaving, default=0.0), tried_again)
            began, boost = session.wait.since, session.wait.boost
            request = self._request(session, session.attained, began, boost, session.wait.urgent)
            queue.append((key, number, request, since))
        pending = {session for _, session in order}
        count = len(queue)
        while pending:
            _, _, request, since = heapq.heappop(queue)
            chosen = self._choose(request, since)
            if request.session in pending:
                pending.remove(request.session)
                found[request.session] = _expected(chosen, self._now)
            if chosen is None:
                continue
            at, devices = chosen
            for stopped in self._give(request, at, devices):
                if count < ROUNDS * len(order):
                    count += 1
                    heapq.heappush(queue, self._again(stopped, at, count))
        return found

    # Leases.

    def _occupy(self, device: EngineDevice, turn: ExpectedLease | None) -> None:
        """Assign a device to a lease, instead of the present one; None: it is free."""
        place = self._places.get(device)
        if place is not None:
            del self._soonest[bisect_left(self._soonest, place.order, key=_order)]
        free = self._now if turn is None else min(turn.end, turn.expires)
        place = self._places[device] = _Place(device, turn, (free, device.number))
        insort(self._soonest, place, key=_order)

    def _give(
        self, request: WaitingRequest, at: float, devices: tuple[EngineDevice, ...]
    ) -> list[ExpectedLease]:
        """Assign devices to a session from a time on; return the unfinished leases it stops."""
        switch = max(device.switch(request.session) for device in devices)
        stopped: dict[EngineSession, ExpectedLease] = {}
        for device in devices:
            turn = self._places[device].turn
            if turn is not None and at < turn.end:
                stopped[turn.session] = turn
            self._occupy(device, self._turn(request.session, at + switch, switch, request.attained))
        return list(stopped.values())

    def _present(self, device: EngineDevice) -> ExpectedLease | None:
        """Return the lease that has a device now, or is about to; None if it is free."""
        if device.incoming is not None:
            coming = device.incoming
            switch = device.switch(coming)
            return self._turn(coming, self._now + switch, switch, coming.attained)
        if not device.lessees:
            return None
        session = device.lessees[0]
        if session.phase is not Phase.RUNNING:
            start = max(self._now, session.lease.granted_at + session.lease.switch)
            return self._turn(session, start, session.lease.switch, session.attained)
        had, level = session.attained_at(self._now), session.lease.level
        return ExpectedLease(
            session=session,
            start=session.lease.run_since,
            attained=session.attained,
            protected=session.lease.protected_until,
            exposed=session.lease.exposed_at,
            expires=session.lease.quantum_end,
            held=self._timers.running.hold_end(session),
            urgent_until=self._urgent_until(session, level, self._now, had),
            throttled=self._is_throttled(session, level),
            end=self._now + self._left(had),
        )

    def _turn(
        self, session: EngineSession, start: float, switch: float, attained: float
    ) -> ExpectedLease:
        """Return a future lease."""
        settings, level = self._settings, level_of(attained, self._settings)
        protected = start + run_min(level, switch, settings)
        return ExpectedLease(
            session=session,
            start=start,
            attained=attained,
            protected=protected,
            exposed=protected,
            expires=start + turn_of(level, switch, settings),
            held=start + settings.max_hold.get(session.terms.tier, math.inf),
            urgent_until=self._urgent_until(session, level, start, attained),
            throttled=self._is_throttled(session, level),
            end=start + self._left(attained),
        )

    def _left(self, attained: float) -> float:
        """Seconds that a cell is expected to last still."""
        return max(self._typical, attained)

    def _is_throttled(self, session: EngineSession, level: int) -> bool:
        return self._timers.waiting.would_throttle(session, level, self._now)

    def _urgent_until(
        self, session: EngineSession, level: int, at: float, attained: float
    ) -> float:
        """Return until when its tier puts an executing cell before others.

        `attained` is what the cell has had by `at`.
        """
        if session.terms.goal == 0.0:
            return -math.inf
        if level <= INTERACTIVE and not self._is_throttled(session, level):
            return at + self._settings.levels[INTERACTIVE] - attained
        spare = self._spare(session, level)
        if spare >= 0.0 or session.terms.goal >= 1.0:
            return -math.inf if spare >= 0.0 else math.inf
        return at - spare / (1.0 - session.terms.goal)  # what it gains by executing

    def _spare(self, session: EngineSession, level: int) -> float:
        """Seconds that a session can lose until its tier target is about to be missed."""
        least = threshold(session.lease.switch, self._settings.quanta[level])
        return session.account.slack_at(session.terms.goal, self._now) - least

    # Requests.

    def _request(
        self, session: EngineSession, attained: float, since: float, boost: int, urgent: bool
    ) -> WaitingRequest:
        """Return the request of a session that waits since a time and has risen `boost` levels."""
        own = level_of(attained, self._settings)
        aging = AGING * self._settings.quanta[own]
        levels = [(max(0, own - boost), -math.inf)]
        levels += [(own - rise, since + rise * aging) for rise in range(boost + 1, own + 1)]
        throttled = self._is_throttled(session, levels[0][0])
        urgent_at = self._now
        if not urgent:
            urgent_at = since + (own + 1) * aging
            if session.terms.goal > 0.0:
                spare = max(0.0, self._spare(session, levels[0][0]))
                early = [at for level, at in levels if level <= INTERACTIVE and not throttled]
                urgent_at = min(urgent_at, self._now + spare / session.terms.goal, *early)
        return WaitingRequest(session, attained, tuple(levels), urgent_at, throttled)

    def _again(self, turn: ExpectedLease, at: float, number: int) -> _Entry:
        """Return the request of a session that was stopped at a time."""
        session, attained = turn.session, turn.attained_at(at)
        level = level_of(attained, self._settings)
        request = self._request(session, attained, at, 0, at < turn.urgent_until)
        key = self._timers.waiting.place_of(session, level, at < turn.urgent_until, at, self._now)
        return key, number, request, at

    # Devices.

    def _choose(self, request: WaitingRequest, since: float) -> _Chosen | None:
        """Return the earliest time for a session, and on which devices; None: unknown."""
        session = request.session
        if session.gpus > 1:
            return self._several(request, since)
        if session.only is not None:
            places = [self._places[session.only]] if session.only in self._places else []
        else:
            homes = [self._places[home] for home in session.residency.homes if home in self._places]
            places = list(dict.fromkeys([*homes, *self._soonest[:CANDIDATES]]))
        ranked = []
        for place in places:
            at = self._available(place, request, since)
            ranked.append((at + place.device.switch(session), place.device.number, at, place))
        for _, _, at, place in sorted(ranked, key=lambda each: each[:2]):
            made = room(session, place.device, self._now, leaving=tuple(place.device.lessees))
            if made is not None:
                return at + made.seconds, (place.device,)
        return None

    def _several(self, request: WaitingRequest, since: float) -> _Chosen | None:
        """Do the same for a session that needs several devices of a node at once."""
        wanted, best = request.session.gpus, None
        for devices in self._nodes.values():
            places = [self._places[device] for device in devices if device in self._places]
            times = sorted(
                (self._available(place, request, since), place.device.number, place.device)
                for place in places
            )[:wanted]
            if len(times) == wanted and (best is None or times[-1][0] < best[0]):
                best = times[-1][0], tuple(device for *_, device in times)
        return best

    def _available(self, place: _Place, request: WaitingRequest, since: float) -> float:
        if place.turn is None:
            return since
        return gives_way(place.turn, request, self._settings, since)


def _expected(chosen: _Chosen | None, now: float) -> Expected:
    return Expected() if chosen is None else Expected(chosen[0] - now, chosen[1])


def _order(place: _Place) -> tuple[float, int]:
    return place.order
