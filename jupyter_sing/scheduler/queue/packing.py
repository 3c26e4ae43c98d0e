"""Sessions that execute on one device at once, kept only while that is measured to be worth it.

Two sessions share a device only when a session waits for a device, both users permit it, and the
memory of both fits beside what must stay. How two programs get along is not predicted: progress of
each is measured alone, then together. With r the step rate together over that alone, a pair is
worth r1 + r2. Time slicing is worth 1.13, as measured: a lease is released while its program
computes elsewhere. So a pair that is tried is kept from 1.2 on and separated otherwise, and one
that was kept is separated below 1.13; the gap prevents that noise separates and retries a pair. A
separated pair is retried after a minute, then two, four, and so on.

Source: Gandiva (OSDI 2018), which packs the least utilised first; its rule has no threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from jupyter_sing.scheduler.queue.residency import NO_VICTIMS, room
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Phase

TURNS = 1.13
"""Worth of time slicing; a pair that was kept is separated below it."""

KEEP = 1.2
"""Least worth at which a pair is kept after the trial."""

PAUSE = 60.0
PAUSE_MAX = 3600.0
CANDIDATES_MAX = 16
"""Sessions of either side that are compared for a pair."""


class PackedPair:
    """Two sessions on one device. `kept`: sharing was measured to be worth it."""

    __slots__ = ("device", "guest", "host", "kept", "rates")

    def __init__(self, host: EngineSession, guest: EngineSession, device: EngineDevice) -> None:
        self.host = host
        self.guest = guest
        self.device = device
        self.rates: dict[EngineSession, float] = {}
        self.kept = False


class Packing:
    """Sessions that could share a device, pairs that do, and pauses after failed trials.

    `may_come` says whether limits allow a waiting session to be loaded on a device.
    """

    def __init__(self, may_come: Callable[[EngineSession, float], bool]) -> None:
        self._may_come = may_come
        self.packs: dict[EngineSession, PackedPair] = {}  # by host and by guest
        self._hosts: dict[EngineSession, None] = {}
        self._guests: dict[EngineSession, None] = {}
        self._pauses: dict[tuple[int, int], tuple[float, float]] = {}  # until, and how long

    def offer(self, session: EngineSession) -> None:
        """Register a session that begins to wait, or to execute alone, if it may share."""
        self.withdraw(session)
        if session.gang is not None or session.gpus > 1 or session.usage.rate_alone is None:
            return
        if session.terms.may_pack:
            if session.phase is Phase.WAITING:
                self._guests[session] = None
            elif session.phase is Phase.RUNNING and len(session.lease.devices[0].lessees) == 1:
                self._hosts[session] = None

    def withdraw(self, session: EngineSession) -> None:
        """Remove a session that neither waits nor executes alone any more."""
        self._hosts.pop(session, None)
        self._guests.pop(session, None)

    def pair(self, now: float) -> tuple[EngineSession, EngineSession] | None:
        """Find (host, guest), the least utilised of both sides that fit."""
        if not self._hosts or not self._guests:
            return None
        hosts = sorted(
            islice(self._hosts, CANDIDATES_MAX), key=lambda s: (s.usage.utilisation, s.number)
        )
        guests = sorted(
            islice(self._guests, CANDIDATES_MAX), key=lambda s: (s.usage.utilisation, s.number)
        )
        for guest in guests:
            if guest.residency.moving or not self._may_come(guest, now):
                continue
            for host in hosts:
                if self._suits(host, guest, now):
                    return host, guest
        return None

    def _suits(self, host: EngineSession, guest: EngineSession, now: float) -> bool:
        device = host.lease.devices[0]
        until, _ = self._pauses.get(_key(host, guest), (now, 0.0))
        return (
            now >= until
            and device.healthy
            and device.incoming is None
            and guest.residency.bound in (None, device)
            and host.lease.right in ("", guest.vc)
            and room(guest, device, now) == NO_VICTIMS
        )

    def join(self, host: EngineSession, guest: EngineSession) -> PackedPair:
        """Record that two sessions share a device from now on."""
        pack = PackedPair(host, guest, host.lease.devices[0])
        self.packs[host] = self.packs[guest] = pack
        self.withdraw(host)
        self.withdraw(guest)
        return pack

    def part(self, pack: PackedPair, now: float, failed: bool) -> None:
        """Record that a pair no longer shares its device; `failed`: because it was not worth it."""
        del self.packs[pack.host], self.packs[pack.guest]
        key = _key(pack.host, pack.guest)
        if failed:
            _, before = self._pauses.get(key, (now, 0.0))
            pause = min(PAUSE_MAX, 2.0 * before) if before else PAUSE
            self._pauses[key] = (now + pause, pause)
        elif pack.kept:
            self._pauses.pop(key, None)

    def measured(self, session: EngineSession) -> float | None:
        """Record the progress of a packed session; return the sum as soon as both are known.

        Then `PackedPair.kept` says whether they stay together.
        """
        pack = self.packs[session]
        if session.usage.step_seconds is None or session.usage.rate_alone is None:
            return None
        pack.rates[session] = 1.0 / session.usage.step_seconds / session.usage.rate_alone
        if len(pack.rates) < 2:
            return None
        total = sum(pack.rates.values())
        pack.rates.clear()
        pack.kept = total >= (TURNS if pack.kept else KEEP)
        return total

    def forget(self, session: EngineSession) -> None:
        """Forget a session that is closed."""
        self.withdraw(session)
        for key in [key for key in self._pauses if session.number in key]:
            del self._pauses[key]


def _key(one: EngineSession, other: EngineSession) -> tuple[int, int]:
    return min(one.number, other.number), max(one.number, other.number)
