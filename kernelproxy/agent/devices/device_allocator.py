"""One device with the sessions on it: who gets its memory, and who waits for it.

Note [Locks]: whoever wants room holds his own session's lock, then takes the room's. While he
holds that he suspends neighbours, and to do so takes their locks only if they are free, without
waiting. So nobody who holds the room's lock waits for a session's, and no two can block each other.
Who is on the device and grows does not wait for the room's lock either, but looks again when it is
free: with his own lock held he could not make room for whoever has it, who would be denied what
there is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from enum import Enum
from typing import Protocol

from kernelproxy.agent.devices.memory_grants import Ledger, Neighbour, plan_room
from kernelproxy.agent.devices.usage_history import History
from kernelproxy.common.readable import bytes_text, device_name
from kernelproxy.devices import Device

#: Seconds between two looks for room while somebody waits. Clients ring when a cell ends, so this
#: matters only where the log was not drained by then, which nobody tells.
LOOK_SECONDS = 0.2


class Answer(Enum):
    """What becomes of a wish for room."""

    GRANTED = "granted"
    DENIED = "denied"
    #: The room's lock was not free, or a neighbour's, so nobody knows what it could give. The
    #: tenant, which is on the device already, is asked to look again when it is.
    LATER = "later"


class Tenant(Protocol):
    """What a room needs of a session."""

    id: str
    name: str
    owner: int
    #: Who it is for.
    user: str
    #: Why it could not be suspended when that was last tried; "" if it could.
    stuck: str

    @property
    def wants_turns(self) -> bool:
        """Whether it executes, or waits for that."""

    @property
    def memory_limit(self) -> int:
        """Bytes that it is to have at most."""

    @property
    def used(self) -> int:
        """Bytes of its device that it has in use."""

    @property
    def kept(self) -> int:
        """Bytes that it keeps whoever wants them: it is pinned."""

    def as_neighbour(self) -> Neighbour | None:
        """How it could make room; None if it has no worker or its lock is not free."""

    @property
    def undecided(self) -> bool:
        """Whether it may be able to make room when its lock is free, which it is not now.

        Never of one that wishes for more itself: two of those would wait for each other.
        """

    def cut_grant(self, grant: int) -> int:
        """Lower its grant to `grant`, or to what it uses by now; return the bytes freed."""

    async def suspend_for(self, other: str) -> bool:
        """Suspend it for another session unless it begins to work meanwhile; its lock is free."""

    def look(self) -> None:
        """Ask it to look again at what it could do."""


class Room:
    """The memory of one device and the queue for it.

    Parameters
    ----------
    device : Device
    step : int
        Granularity of grants in bytes.
    """

    def __init__(self, device: Device, step: int) -> None:
        self.device = device
        self.ledger = Ledger(device.memory_total, step)
        self.tenants: dict[str, Tenant] = {}
        #: All rooms that there are, this one too.
        self.rooms: list[Room] = [self]
        self.queue: deque[Tenant] = deque()
        #: Ids of those who may execute here, and since when it is these.
        self.lessees: dict[str, None] = {}
        self.lessees_since = time.monotonic()
        self.history = History()
        self._lock = asyncio.Lock()
        self._busy = 0  # who has the lock, and who waits for it
        self._behind: list[Tenant] = []  # who looks again when somebody has done with it
        self._asking: dict[str, list[Tenant]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, tenant: Tenant, need: int, *, queued: bool) -> Answer:
        """Give a session a grant of at least `need` bytes, making room if need be.

        Parameters
        ----------
        tenant : Tenant
            Its lock is held (Note [Locks]).
        need : int
            Bytes it must have in all.
        queued : bool
            Whether it comes back to the device, and so may not overtake those who wait; a
            session that is there and grows may.

        Returns
        -------
        Answer
            If it is not granted, nobody was disturbed for nothing, except where a neighbour began
            to work while it was being suspended.
        """
        if self._busy and not queued:
            self._behind.append(tenant)
            return Answer.LATER
        self._busy += 1
        try:
            async with self._lock:
                answer = await self._reserve(tenant, need, queued)
        finally:
            self._busy -= 1
            behind, self._behind = self._behind, []
            for each in behind:
                each.look()
        if answer is Answer.GRANTED:
            self.leave_queue(tenant)
        return answer

    async def _reserve(self, tenant: Tenant, need: int, queued: bool) -> Answer:
        first = not self.queue or self.queue[0] is tenant
        if queued and not first and self.ledger.of(tenant.id) < need:
            return Answer.DENIED
        tried: set[str] = set()
        while short := self.ledger.short(tenant.id, need):
            plan = plan_room(short, self._neighbours(tenant, tried))
            if plan is None:
                return Answer.DENIED if queued else self._refuse(tenant)
            for name, grant in plan.cut.items():
                if not self.tenants[name].cut_grant(grant):
                    tried.add(name)
            for name in plan.suspend:
                tried.add(name)
                neighbour = self.tenants.get(name)
                if neighbour is None or not await neighbour.suspend_for(tenant.id):
                    break  # plan again without it
        most = max(need, tenant.memory_limit)
        self.ledger.hold(tenant.id, min(self.ledger.rounded(tenant.id, need), most))
        return Answer.GRANTED

    def used_elsewhere(self, tenant: Tenant) -> int:
        """Bytes of devices that other sessions of the same user have in use."""
        all_of_them = (each for room in self.rooms for each in room.tenants.values())
        return sum(e.used for e in all_of_them if e is not tenant and e.user == tenant.user)

    def kept_from(self, tenant: Tenant, need: int) -> str:
        """Say who keeps what a session would need, whatever others do; "" if nobody does."""
        pinned = [each for each in self.tenants.values() if each is not tenant and each.kept]
        kept = sum(each.kept for each in pinned)
        if need <= self.ledger.total - kept:
            return ""
        # Of other users' sessions nobody learns more than whose memory it is.
        known = {e.name if e.owner == tenant.owner else "another user" for e in pinned}
        names = " and ".join(sorted(known))
        keep = "is pinned and keeps" if len(pinned) == 1 else "are pinned and keep"
        return (
            f"Waiting for {bytes_text(need)} on {device_name(self.device.id)}: {names} {keep} "
            f"{bytes_text(kept)}."
        )

    def stuck(self, tenant: Tenant) -> str:
        """Say why somebody who could make room cannot be suspended; "" if nobody is such."""
        found = [each.stuck for each in self.tenants.values() if each is not tenant and each.stuck]
        return f"Waiting for {device_name(self.device.id)}. {found[0]}" if found else ""

    def _refuse(self, tenant: Tenant) -> Answer:
        undecided = [each for each in self.tenants.values() if each.undecided]
        for each in undecided:
            self._asking.setdefault(each.id, []).append(tenant)
        return Answer.LATER if undecided else Answer.DENIED

    def decided(self, tenant: Tenant) -> None:
        """A tenant's lock is free: let those look again who were told to wait for that."""
        for each in self._asking.pop(tenant.id, []):
            each.look()

    def _neighbours(self, tenant: Tenant, tried: set[str]) -> list[Neighbour]:
        """List those who could make room. Who refused is not asked again: planning ends."""
        found = (
            each.as_neighbour()
            for name, each in self.tenants.items()
            if each is not tenant and name not in tried
        )
        return [each for each in found if each is not None]

    def enter(self, session: str) -> None:
        """A session may execute here from now on."""
        self.lessees[session] = None
        self.lessees_since = time.monotonic()
        self.history.began(session, self.lessees_since)

    def leave(self, session: str) -> None:
        """A session may execute here no more."""
        del self.lessees[session]
        self.lessees_since = time.monotonic()
        self.history.ended(session, self.lessees_since)

    def release(self, tenant: Tenant) -> None:
        """Take a session's grant back: its worker is gone."""
        self.ledger.release(tenant.id)
        self.changed()

    def enqueue(self, tenant: Tenant) -> int:
        """Let a session wait for room, behind those who wait; return its place, from 1."""
        if tenant not in self.queue:
            self.queue.append(tenant)
            self._look_later()
        return self.queue.index(tenant) + 1

    def place(self, tenant: Tenant) -> int | None:
        """Place of a session in the queue, from 1; None: it is not in it."""
        return self.queue.index(tenant) + 1 if tenant in self.queue else None

    def leave_queue(self, tenant: Tenant) -> None:
        """Take a session out of the queue; one that is not in it is no error."""
        if tenant in self.queue:
            self.queue.remove(tenant)
            self.changed()

    def changed(self) -> None:
        """There may be room now: let the first who waits look."""
        if self.queue:
            self.queue[0].look()

    def _look_later(self) -> None:
        if self._timer is None and self.queue:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOOK_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.changed()
        self._look_later()
