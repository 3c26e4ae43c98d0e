"""Why sessions wait, in a sentence; at which position, and about how long."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_sing.scheduler.explain.wait_forecast import Expected, Forecast
from jupyter_sing.scheduler.fairness.fair_queue import Flow
from jupyter_sing.scheduler.fairness.limits import Held
from jupyter_sing.scheduler.ids import SessionId
from jupyter_sing.scheduler.queue.dispatcher import Dispatcher
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.queue.wait_queue import Key
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Phase
from kernelproxy.common.units import bytes_text


@dataclass(frozen=True, slots=True)
class ExplainedWait:
    """Prospects of a waiting session.

    Attributes
    ----------
    position
        From 1 (next), among the sessions that wait for the same devices, or within the same limit.
    expected_wait
        Seconds until its grant; `math.inf`: it waits for ever as things are, and `reason` says what
        has to change; None: unknown.
    reason
        A clause: why it has no device now.
    where
        A clause: the device that it is likely to get, and who uses it now; empty if something else
        has to happen first, or if that is unknown.
    """

    position: int
    expected_wait: float | None
    reason: str
    where: str = ""


class Explainer:
    """Explains to users why their sessions wait, and for how long.

    Attributes
    ----------
    turn
        Moving average of how long leases last, in seconds.
    """

    def __init__(self, timers: Timers, leases: LeaseTable, dispatcher: Dispatcher) -> None:
        self._timers = timers
        self._waiting, self._limiter = timers.waiting, timers.limiter
        self._leases = leases
        self._dispatcher = dispatcher
        self._largest = max((device.memory for device in leases.table.devices.values()), default=0)
        self.turn = 1.0

    def ended(self, seconds: float) -> None:
        """Record how long a lease has lasted."""
        self.turn += 0.05 * (seconds - self.turn)

    def why(self, session: EngineSession, now: float) -> str:
        """Return why a session waits, as a clause."""
        never = self._never(session)
        if never is not None:
            return never
        limit = self._limiter.reason(session, now)
        return self._usual(session, now) if limit is None else limit.text

    def outlooks(self, now: float) -> dict[SessionId, ExplainedWait]:
        """Return the outlook of every waiting session."""
        found: dict[SessionId, ExplainedWait] = {}
        line = _Line()
        for session in self._leases.sessions.values():
            if session.phase is Phase.RESERVED:
                rest, why = self._leases.reservations.awaited(session)
                place = line.place(self._leases.reservations.reserved(session)[0])
                found[session.id] = ExplainedWait(place, rest, why)
            elif session.phase is Phase.WAITING and session not in self._waiting:
                found[session.id] = self._aside(session, now)
        free: list[tuple[Key, EngineSession]] = []
        limited: dict[Flow, list[tuple[Key, EngineSession, Held]]] = {}
        for key, session in self._waiting.order(now):
            limit = self._limiter.reason(session, now)
            if self._never(session) is not None:
                found[session.id] = self._aside(session, now)
            elif limit is None:
                free.append((key, session))
            else:
                limited.setdefault(limit.flow, []).append((key, session, limit))
        expected = self._forecast(free, self._leases.table.devices.values(), now)
        for _, session in free:
            held_up = session.residency.moving or self._leases.table.tried_again(session, now) > now
            where = "" if held_up else _where(expected[session].devices)
            place, seconds = line.place(session.only), expected[session].seconds
            found[session.id] = ExplainedWait(place, seconds, self._usual(session, now), where)
        for flow, those in limited.items():
            found |= self._within(flow, those, now)
        return found

    def _forecast(
        self, order: list[tuple[Key, EngineSession]], devices: Iterable[EngineDevice], now: float
    ) -> dict[EngineSession, Expected]:
        if not order:
            return {}
        return Forecast(self._timers, self._leases, self.turn, devices, now).run(order)

    def _within(
        self, flow: Flow, those: list[tuple[Key, EngineSession, Held]], now: float
    ) -> dict[SessionId, ExplainedWait]:
        """Return the outlooks of sessions that wait for a limit of `flow`.

        They can only get devices that sessions of that user or virtual cluster hold.
        """
        assert flow.quota
        waiting = [(key, session) for key, session, _ in those]
        held = (device for holder in flow.quota.holders for device in self._held(holder))
        expected = self._forecast(waiting, dict.fromkeys(held), now)
        found = {}
        for index, (_, session, limit) in enumerate(those):
            seconds = expected[session].seconds if limit.seconds is None else limit.seconds
            found[session.id] = ExplainedWait(index + 1, seconds, limit.text)
        return found

    def _held(self, holder: EngineSession) -> tuple[EngineDevice, ...]:
        if holder.phase is Phase.RESERVED:
            return self._leases.reservations.reserved(holder)
        return holder.lease.devices

    def _aside(self, session: EngineSession, now: float) -> ExplainedWait:
        """Return the outlook of a session that waits for room within a limit, or for ever."""
        limit, place = self._limiter.reason(session, now), 1
        seconds: float | None = None
        if self._never(session) is not None:
            seconds = math.inf
        elif limit is not None:
            seconds = limit.seconds
        if session.wait.short is not None:
            place += list(session.wait.short.short).index(session)
        return ExplainedWait(place, seconds, self.why(session, now))

    def _never(self, session: EngineSession) -> str | None:
        """Return what has to change before it can have a device at all; None: nothing."""
        devices = self._leases.table.devices.values()
        if not any(each.healthy for each in ([session.only] if session.only else devices)):
            return "No device that it may use is in working order"
        if session in self._dispatcher.hopeless:
            widest = self._dispatcher.widest
            most = f"{widest} device{'' if widest == 1 else 's'}"
            return f"It needs {session.gpus} devices at once, and {most} is the most there can be"
        if session.memory > self._largest:
            return (
                f"It has {bytes_text(session.memory)}, and the largest device"
                f" {bytes_text(self._largest)}"
            )
        return None

    def _usual(self, session: EngineSession, now: float) -> str:
        if session.residency.moving:
            return "its memory is moving"
        if self._leases.table.tried_again(session, now) > now:
            return "the last attempt failed; the next one is soon"
        count = len(self._waiting)
        devices = len(self._leases.table.devices)
        wanted = "1 device" if devices == 1 else f"{devices} devices"
        return f"{count} session{' waits' if count == 1 else 's wait'} for {wanted}"


class _Line:
    """Positions of waiting sessions, in their order; some of them can use only one device."""

    def __init__(self) -> None:
        self._all = self._anywhere = 0
        self._only: dict[EngineDevice, int] = {}

    def place(self, only: EngineDevice | None) -> int:
        """Return the next position."""
        self._all += 1
        if only is None:
            self._anywhere += 1
            return self._all
        self._only[only] = self._only.get(only, 0) + 1
        return self._anywhere + self._only[only]


def _where(devices: tuple[EngineDevice, ...]) -> str:
    """Return the devices that a session is likely to get, and who uses the device if it is one."""
    if len(devices) != 1:
        return f"{len(devices)} devices" if devices else ""
    (device,) = devices
    if device.lessees:
        names = " and ".join(lessee.id for lessee in device.lessees)
        return f"{device.id} (in use by {names})"
    if device.incoming is not None:
        return f"{device.id} ({device.incoming.id} goes first)"
    return device.id
