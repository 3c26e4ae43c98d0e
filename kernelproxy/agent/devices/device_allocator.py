"""One device with the sessions on it: allocation of its memory, and the queue for it.

Note [Locks]: a session that needs memory holds its own session lock, and then takes the device's
lock. While it holds that, it suspends neighbours; for this it takes their session locks only if
they are free, without waiting. So no holder of the device's lock waits for a session lock, and no
two sessions can block each other.
A resident session that grows does not wait for the device's lock either, but retries when the lock
is free. If it waited, it would hold its session lock, so it could not make room for the holder of
the device's lock, whose request would then be denied although there is memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Protocol

from kernelproxy.agent.devices.measured_memory import MeasuredMemory, MeasuredTenant
from kernelproxy.agent.devices.memory_grants import GrantTable, Neighbour, plan_room
from kernelproxy.agent.devices.usage_history import UsageHistory
from kernelproxy.common.protocol import DeviceLost
from kernelproxy.common.readable import device_name
from kernelproxy.common.units import bytes_text
from kernelproxy.devices import Device
from kernelproxy.devices.memory_meter import MemoryMeter

#: Interval in seconds at which the first session in the queue checks for memory. Clients ring when
#: a cell ends, so this matters only where the log was not drained by then: there is no notification
#: for that.
POLL_SECONDS = 0.2
#: Seconds for which the memory that the driver reported may be relied on while there is room.
FRESH_SECONDS = 1.0


class GrantAnswer(Enum):
    """Outcome of a request for memory."""

    GRANTED = "granted"
    DENIED = "denied"
    #: The lock of the device or of a neighbour was not free, so it is not known what that neighbour
    #: could give. The tenant, which is resident, is made to reconcile when the lock is free.
    LATER = "later"


class Tenant(MeasuredTenant, Protocol):
    """A session as a device's allocator uses it."""

    id: str
    name: str
    owner: int
    #: Name of the user that it is for.
    user: str

    @property
    def suspend_failure(self) -> str:
        """Why the last attempt to suspend it failed; "" if it did not fail."""

    @property
    def wants_turns(self) -> bool:
        """True if it executes, or waits to."""

    @property
    def memory_limit(self) -> int:
        """Bytes that it may have at most."""

    @property
    def used(self) -> int:
        """Bytes of its device that it uses."""

    @property
    def kept(self) -> int:
        """Bytes that it keeps, because it is pinned, even if other sessions need them."""

    def as_neighbour(self) -> Neighbour | None:
        """Return how it could make room; None if it has no worker or its lock is not free."""

    @property
    def lock_taken(self) -> bool:
        """True if its lock is not free now, and it may be able to make room when it is.

        Never True for a session that requests more memory itself: two of those would wait for each
        other.
        """

    def cut_grant(self, grant: int) -> int:
        """Lower its grant to `grant`, or to what it uses by now; return the bytes freed."""

    async def suspend_for(self, other: str) -> bool:
        """Suspend it for another session unless it begins to work meanwhile; its lock is free."""

    def request_reconcile(self) -> None:
        """Make it reconcile."""


class SpareContext(Protocol):
    """A context in advance, which ends when a session needs its memory: see `ContextPool`."""

    async def give_way(self) -> bool:
        """Free its memory; return True if it had any."""

    def note_use(self) -> None:
        """Note that a worker has ended on the device."""


class DeviceAllocator:
    """The memory of one device and the queue for it.

    Parameters
    ----------
    device : Device
    step : int
        Granularity of grants in bytes.
    meter : MemoryMeter, optional
        What the driver reports of the device's memory; None for a software device.
    """

    def __init__(self, device: Device, step: int, meter: MemoryMeter | None = None) -> None:
        self.device = device
        physical = device.memory_physical if meter is not None else 0
        self.ledger = GrantTable(device.memory_total, step, physical)
        self.tenants: dict[str, Tenant] = {}
        self.measured = MeasuredMemory(meter, self.ledger, self.tenants, self._tenants_elsewhere)
        self.spare: SpareContext | None = None
        #: All devices, including this one.
        self.allocators: list[DeviceAllocator] = [self]
        self.queue: deque[Tenant] = deque()
        #: Ids of the sessions that may execute here, and the time since when it is these.
        self.lessees: dict[str, None] = {}
        self.lessees_since = time.monotonic()
        self.history = UsageHistory()
        #: Why it is out of use, as a sentence; "" if it is not. See Note [Failed devices].
        self.failure = ""
        #: Called when a worker has lost it, with this, the party concerned and what it said.
        self.on_loss: Callable[[DeviceAllocator, str, DeviceLost], object] = lambda *_: None
        self._lock = asyncio.Lock()
        self._busy = 0  # number of holders and waiters of the lock
        self._behind: list[Tenant] = []  # they reconcile when the lock is released
        self._requesting: dict[str, list[Tenant]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, tenant: Tenant, need: int, *, queued: bool) -> GrantAnswer:
        """Give a session a grant of at least `need` bytes; make room if necessary.

        Parameters
        ----------
        tenant : Tenant
            Its lock is held (Note [Locks]).
        need : int
            Bytes it must have in all.
        queued : bool
            True if it resumes, and so may not overtake the queue; a resident session that grows
            may.

        Returns
        -------
        GrantAnswer
            If it is not granted, no neighbour was disturbed in vain, except where one began to
            work while it was being suspended.
        """
        if self._busy and not queued:
            self._behind.append(tenant)
            return GrantAnswer.LATER
        self._busy += 1
        try:
            async with self._lock:
                answer = await self._reserve(tenant, need, queued)
        finally:
            self._busy -= 1
            behind, self._behind = self._behind, []
            for each in behind:
                each.request_reconcile()
        if answer is GrantAnswer.GRANTED:
            self.leave_queue(tenant)
        return answer

    async def _reserve(self, tenant: Tenant, need: int, queued: bool) -> GrantAnswer:
        first = not self.queue or self.queue[0] is tenant
        if queued and not first and self.ledger.of(tenant.id) < need:
            return GrantAnswer.DENIED
        tried: set[str] = set()
        emptied: set[str] = set()  # whose caches were given back
        measured = self.measured
        await measured.refresh(FRESH_SECONDS)
        measured.expect(tenant.id)
        if self.ledger.short(tenant.id, need):
            await measured.refresh(FRESH_SECONDS / 10)
        while short := self.ledger.short(tenant.id, need):
            if self.spare is not None and await self.spare.give_way():
                await measured.refresh()
                continue
            plan = plan_room(short, self._neighbours(tenant, tried, emptied))
            if plan is None:
                if await measured.reclaim_unknown(set(self.tenants) - {tenant.id} - emptied):
                    emptied |= set(self.tenants)
                    continue
                return GrantAnswer.DENIED if queued else self._refuse(tenant)
            for name, grant in plan.cut.items():
                cached = name not in emptied and measured.cached(name)
                if not self.tenants[name].cut_grant(grant) and not cached:
                    tried.add(name)
            await measured.reclaim(plan.cut.keys() - tried)
            emptied |= plan.cut.keys()
            for name in plan.suspend:
                tried.add(name)
                neighbour = self.tenants.get(name)
                if neighbour is None or not await neighbour.suspend_for(tenant.id):
                    break  # plan again without it
        most = max(need, tenant.memory_limit)
        self.ledger.hold(tenant.id, min(self.ledger.rounded(tenant.id, need), most))
        return GrantAnswer.GRANTED

    async def empty_caches(self, tenant: Tenant) -> None:
        """Make all other workers give back what they keep in reserve: a session finds no memory."""
        if self.spare is not None:
            await self.spare.give_way()
        await self.measured.reclaim(self.tenants.keys() - {tenant.id})

    def used_elsewhere(self, tenant: Tenant) -> int:
        """Return the bytes of all devices that other sessions of the same user use."""
        all_of_them = (each for allocator in self.allocators for each in allocator.tenants.values())
        return sum(e.used for e in all_of_them if e is not tenant and e.user == tenant.user)

    def kept_from(self, tenant: Tenant, need: int) -> str:
        """Return which pinned sessions keep what a session needs, as a sentence; "" if none do."""
        pinned = [each for each in self.tenants.values() if each is not tenant and each.kept]
        kept = sum(each.kept for each in pinned)
        most = self.ledger.most(tenant.id)
        if need <= most - kept:
            return ""
        if need > most and self.measured.present:
            return (
                f"Waiting for {bytes_text(need)} on {device_name(self.device.id)}: "
                f"{self.measured.who_is_outside()}."
            )
        # Of other users' sessions, their names are not shown.
        known = {e.name if e.owner == tenant.owner else "another user" for e in pinned}
        names = " and ".join(sorted(known))
        keep = "is pinned and keeps" if len(pinned) == 1 else "are pinned and keep"
        return (
            f"Waiting for {bytes_text(need)} on {device_name(self.device.id)}: {names} {keep} "
            f"{bytes_text(kept)}."
        )

    def suspend_failure(self, tenant: Tenant) -> str:
        """Return why a session that could make room cannot be suspended; "" if there is none."""
        found = [
            each.suspend_failure
            for each in self.tenants.values()
            if each is not tenant and each.suspend_failure
        ]
        return f"Waiting for {device_name(self.device.id)}. {found[0]}" if found else ""

    def _refuse(self, tenant: Tenant) -> GrantAnswer:
        lock_taken = [each for each in self.tenants.values() if each.lock_taken]
        for each in lock_taken:
            self._requesting.setdefault(each.id, []).append(tenant)
        return GrantAnswer.LATER if lock_taken else GrantAnswer.DENIED

    def decided(self, tenant: Tenant) -> None:
        """Make the sessions reconcile that wait for a tenant's lock, which is free now."""
        for each in self._requesting.pop(tenant.id, []):
            each.request_reconcile()

    def _neighbours(self, tenant: Tenant, tried: set[str], emptied: set[str]) -> list[Neighbour]:
        """List the sessions that could make room, without those tried before: so planning ends."""
        found = (
            each.as_neighbour()
            for name, each in self.tenants.items()
            if each is not tenant and name not in tried
        )
        accounts = self.measured.accounts.workers
        neighbours = []
        for each in found:
            if each is not None and (account := accounts.get(each.session)):
                # What it kept although it was to give it back is free when its worker ends.
                cached = 0 if each.session in emptied else account.cached
                each = replace(each, cached=cached, context=account.charge - cached)
            if each is not None:
                neighbours.append(each)
        return neighbours

    def _tenants_elsewhere(self) -> list[Tenant]:
        """List the sessions on other devices."""
        others = (each for each in self.allocators if each is not self)
        return [tenant for each in others for tenant in each.tenants.values()]

    def enter(self, session: str) -> None:
        """Note that a session may execute here from now on."""
        self.lessees[session] = None
        self.lessees_since = time.monotonic()
        self.history.began(session, self.lessees_since)

    def leave(self, session: str) -> None:
        """Note that a session may not execute here any more."""
        del self.lessees[session]
        self.lessees_since = time.monotonic()
        self.history.ended(session, self.lessees_since)

    def release(self, tenant: Tenant) -> None:
        """Take a session's grant back: its worker is gone."""
        self.ledger.release(tenant.id)
        self.measured.accounts.forget(tenant.id)
        if self.spare is not None:
            self.spare.note_use()
        self.changed()

    def enqueue(self, tenant: Tenant) -> int:
        """Add a session to the end of the queue, unless it is in it; return its place, from 1."""
        if tenant not in self.queue:
            self.queue.append(tenant)
            self._schedule_check()
        return self.queue.index(tenant) + 1

    def place(self, tenant: Tenant) -> int | None:
        """Return a session's place in the queue, from 1; None: it is not in it."""
        return self.queue.index(tenant) + 1 if tenant in self.queue else None

    def leave_queue(self, tenant: Tenant) -> None:
        """Take a session out of the queue. Idempotent."""
        if tenant in self.queue:
            self.queue.remove(tenant)
            self.changed()

    def changed(self) -> None:
        """Make the first session in the queue reconcile: there may be room now."""
        if self.queue:
            self.queue[0].request_reconcile()

    def _schedule_check(self) -> None:
        if self._timer is None and self.queue:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(POLL_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.changed()
        self._schedule_check()
