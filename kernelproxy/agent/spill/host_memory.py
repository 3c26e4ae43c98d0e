"""Budget of host memory for logs and suspended states; spills states when it is short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Protocol

from kernelproxy.agent.control_groups import memory_left
from kernelproxy.agent.spill.spill_policy import SuspendedState, choose_cold, seconds_to_next
from kernelproxy.agent.spill.spill_store import SpillStore
from kernelproxy.common.errors import ControlError, SingError, StoreError
from kernelproxy.common.options import DISK_QUOTA, HOST_MEMORY
from kernelproxy.common.units import bytes_text

log = logging.getLogger(__name__)

#: Seconds after which a state that could not be spilled is tried again.
RETRY_SECONDS = 60.0
POLL_SECONDS_MIN = 1.0
#: Bytes of the machine's memory that are left to other programs.
MARGIN_BYTES = 256 << 20
_MEMINFO = Path("/proc/meminfo")


def available() -> int:
    """Return the bytes that the machine, or its container, can still give without swapping."""
    left = memory_left()
    found = sys.maxsize if left is None else left
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = min(found, int(line.split()[1]) << 10)
    return found


class HostMemoryUser(Protocol):
    """A session as `HostMemory` uses it."""

    id: str

    @property
    def user(self) -> str:
        """User whose disk quota its state counts against."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it uses."""

    @property
    def lock_taken(self) -> bool:
        """True while its lock is taken, so whether it can be spilled is not known yet."""

    def as_suspended(self) -> SuspendedState | None:
        """Return its state as one that can be spilled; None if it cannot be now."""

    async def spill(self) -> bool:
        """Spill its state, unless it is wanted meanwhile; return True if it is on disk.

        If it is not, its lock is not free, or it is not suspended any more.
        """


class HostMemory:
    """Keeps all sessions within one budget of host memory.

    Parameters
    ----------
    budget : callable
        Returns the bytes that sessions may use; they follow the memory of a machine, or container,
        that grows.
    cold_after : float
        Seconds without use after which a suspended state is spilled; 0 or less: never because of
        time.
    cold : SpillStore
        Store of spilled states.
    guests : callable
        Returns all sessions.
    """

    def __init__(
        self,
        budget: Callable[[], int],
        cold_after: float,
        cold: SpillStore,
        guests: Callable[[], Iterable[HostMemoryUser]],
    ) -> None:
        self.cold = cold
        self._budget, self._cold_after, self._guests = budget, cold_after, guests
        self._timer: asyncio.TimerHandle | None = None
        self._balancing: asyncio.Task[None] | None = None
        self._again = False
        self._refused: dict[str, float] = {}  # time until which they are not tried again
        self._undecided: set[str] = set()  # to be checked when their locks are free
        self._admitted: dict[str, int] = {}  # total bytes for sessions that are being suspended

    def has(self, count: int) -> bool:
        """Return True if so many more bytes may be used."""
        return self._taken() + count <= self._budget()

    def _taken(self) -> int:
        admitted = self._admitted
        return sum(max(each.host_bytes, admitted.get(each.id, 0)) for each in self._guests())

    @contextlib.asynccontextmanager
    async def admitted(self, guest: HostMemoryUser, count: int) -> AsyncIterator[None]:
        """Reserve so many more bytes for a session while it is being suspended.

        What exceeds the budget must fit on disk, where it is spilled next.

        Raises
        ------
        ControlError
            ``quota``, if there is no room in host memory, nor on disk.
        """
        self._admitted[guest.id] = guest.host_bytes + count
        try:
            excess = self._taken() - self._budget()
            if count > 0 and excess > 0 and (full := await self._disk_lacks(guest, excess)):
                raise ControlError(
                    f"Host memory for suspended sessions is full ({bytes_text(self._budget())}), "
                    f"and {full} Close notebooks, delete checkpoints, or raise "
                    f"{HOST_MEMORY.variable} or {DISK_QUOTA.variable}.",
                    "quota",
                )
            if count > 0 and not await self._machine_has(count):
                raise ControlError(
                    f"This machine has too little free memory to hold the state "
                    f"({bytes_text(count)}) off the device. Close notebooks or other programs.",
                    "quota",
                )
            yield
        finally:
            del self._admitted[guest.id]

    async def _machine_has(self, count: int) -> bool:
        """Return True if the machine has so many bytes free; spill other states for that."""
        short = count + MARGIN_BYTES - available()
        if short <= 0:
            return True
        if self.cold.usable:
            guests = {each.id: each for each in self._guests()}
            parked = [p for each in guests.values() if (p := each.as_suspended())]
            for name in choose_cold(parked, short, time.monotonic(), 0.0):
                await self._chill(guests[name])
        return count + MARGIN_BYTES <= available()

    async def _disk_lacks(self, guest: HostMemoryUser, count: int) -> str:
        """Return why the disk cannot take so many bytes; "" if it can."""
        if not self.cold.usable:
            return "nothing may go to disk."
        try:
            left = await asyncio.to_thread(self.cold.left, guest.user)
        except (StoreError, OSError) as error:
            return f"the disk cannot be used: {str(error).rstrip('.')}."
        if count <= left:
            return ""
        return f"so is the disk quota ({bytes_text(left)} left, {bytes_text(count)} needed)."

    def changed(self) -> None:
        """Spill states if necessary, as a session was suspended, or uses more."""
        if not self.cold.usable:
            return
        self._again = True
        if self._balancing is None or self._balancing.done():
            self._balancing = asyncio.create_task(self._balance())

    async def _balance(self) -> None:
        while self._again:
            self._again = False
            if self._timer is not None:
                self._timer.cancel()
            now, guests = time.monotonic(), {each.id: each for each in self._guests()}
            self._undecided = {each.id for each in guests.values() if each.lock_taken}
            found = [p for each in guests.values() if (p := each.as_suspended())]
            parked = [each for each in found if self._refused.get(each.session, 0.0) <= now]
            excess = sum(each.host_bytes for each in guests.values()) - self._budget()
            for name in choose_cold(parked, excess, now, self._cold_after):
                await self._chill(guests[name])
            left = [seconds_to_next(parked, time.monotonic(), self._cold_after)]
            left += [self._refused[p.session] - now for p in found if p.session in self._refused]
            if min(left) != float("inf"):
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(min(left), POLL_SECONDS_MIN), self.changed)

    async def _chill(self, guest: HostMemoryUser) -> None:
        self._refused.pop(guest.id, None)
        try:
            if not await guest.spill():
                self._undecided.add(guest.id)
        except SingError as error:
            log.warning("Session %s could not go to disk: %s", guest.id, error)
            self._refused[guest.id] = time.monotonic() + RETRY_SECONDS

    def decided(self, guest: HostMemoryUser) -> None:
        """Check again if a session, whose lock is free now, could not be checked before."""
        if guest.id in self._undecided:
            self.changed()

    def forget(self, guest: HostMemoryUser) -> None:
        """Remove a session that has ended."""
        self._refused.pop(guest.id, None)
        self._undecided.discard(guest.id)

    async def close(self) -> None:
        """Stop spilling."""
        if self._timer is not None:
            self._timer.cancel()
        if self._balancing is not None:
            self._balancing.cancel()
            await asyncio.wait({self._balancing})
