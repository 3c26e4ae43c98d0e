"""The memory of a device as its driver reports it, in the device's ledger.

A device without a meter (a software device) is never measured: all methods return at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from kernelproxy.agent.devices.memory_accounts import MemoryAccounts, WorkerMemory
from kernelproxy.agent.devices.memory_grants import GrantTable
from kernelproxy.agent.devices.outside_process import OutsideProcess
from kernelproxy.common.units import bytes_text
from kernelproxy.devices.memory_meter import MemoryMeter, MemorySample

#: Seconds to wait for the driver. One that takes longer is asked again when it has answered.
MEASURE_SECONDS = 2.0
#: Seconds between two attempts to make all workers give back caches whose size is not known.
BLIND_SECONDS = 10.0
#: Seconds between two measurements while there are sessions.
WATCH_SECONDS = 2.0
#: Name of the context pool in accounts and the ledger, where sessions have their ids.
POOL = "context pool"
#: Bytes below which a process outside, or a change of the memory there, is not worth a word.
_WORTH_NAMING = 32 << 20


class MeasuredTenant(Protocol):
    """A session as its memory is measured."""

    def worker_memory(self) -> WorkerMemory | None:
        """Return its worker's own figures; None if it has no worker."""

    @property
    def pids(self) -> Collection[int]:
        """The processes that it has on any device."""

    async def give_back_cache(self) -> int | None:
        """Make its worker give back the memory that it keeps for its next tensors.

        Returns
        -------
        int or None
            Bytes that it could not give back; None: it did not do so in time.
        """


class MeasuredMemory:
    """Measures one device's memory, and makes workers give back what they keep in reserve.

    Parameters
    ----------
    meter : MemoryMeter or None
    ledger : GrantTable
    tenants : mapping of str to MeasuredTenant
        The sessions on the device.
    elsewhere : callable
        Returns those on other devices.
    """

    def __init__(
        self,
        meter: MemoryMeter | None,
        ledger: GrantTable,
        tenants: Mapping[str, MeasuredTenant],
        elsewhere: Callable[[], Iterable[MeasuredTenant]],
    ) -> None:
        self.accounts = MemoryAccounts()
        #: Processes that are no workers.
        self.outside: list[OutsideProcess] = []
        #: True if the driver answered last time.
        self.answers = True
        #: Called when the memory outside, or its processes, have changed.
        self.on_change: Callable[[], object] = lambda: None
        #: Returns the figures of a worker without a session, see `ContextPool`.
        self.pool_memory: Callable[[], WorkerMemory | None] = lambda: None
        self._meter, self._ledger = meter, ledger
        self._tenants, self._elsewhere = tenants, elsewhere
        self._lock = asyncio.Lock()  # so that each caller's figures are newer than its call
        self._measuring: asyncio.Future[MemorySample | None] | None = None
        self._measured_at = float("-inf")
        self._emptied_at = float("-inf")

    @property
    def present(self) -> bool:
        """True if the device has a meter."""
        return self._meter is not None

    async def refresh(self, age_max: float = 0.0) -> bool:
        """Measure, unless that was done in the last `age_max` seconds.

        Returns
        -------
        bool
            True if there are newer figures.
        """
        if self._meter is None or time.monotonic() - self._measured_at <= age_max:
            return False
        async with self._lock:
            workers = self._workers()
            if self._measuring is None:
                loop = asyncio.get_running_loop()
                self._measuring = loop.run_in_executor(None, self._meter.measure)
            await asyncio.wait({self._measuring}, timeout=MEASURE_SECONDS)
            if not self._measuring.done():
                self.answers = False
                return False
            measured, self._measuring = self._measuring, None
            sample = measured.result()
        self._measured_at = time.monotonic()
        self.answers = sample is not None
        if sample is None:
            return False
        after = self._workers()
        # One that has changed meanwhile is measured the next time: the two figures do not fit.
        still = {name: each for name, each in after.items() if workers.get(name) == each}
        self._take(sample, after, after.keys() - still.keys())
        return True

    async def watch(self) -> None:
        """Measure from time to time while there are sessions, for users who look at it."""
        while self._meter is not None:
            await asyncio.sleep(WATCH_SECONDS)
            if self._tenants:
                await self.refresh(WATCH_SECONDS / 2)

    def expect(self, session: str) -> None:
        """Charge a session for the worker that it is about to get, unless it has one."""
        if self._meter is not None and session not in self.accounts.workers:
            self._ledger.charge(session, self.accounts.estimate)

    def cached(self, session: str) -> int:
        """Return the bytes that a session's worker has taken beyond its grant and context."""
        account = self.accounts.workers.get(session)
        return account.cached if account else 0

    async def reclaim(self, sessions: Collection[str]) -> None:
        """Make the workers of sessions give back their caches; then measure."""
        tenants = {name: self._tenants[name] for name in sessions if name in self._tenants}
        if self._meter is None or not tenants:
            return
        kept = await asyncio.gather(*(each.give_back_cache() for each in tenants.values()))
        if await self.refresh():
            workers = self._workers()
            for name, count in zip(tenants, kept, strict=True):
                if count is not None and name in workers:
                    self.accounts.gave_back(name, workers[name], count)
            self._charge()

    async def reclaim_unknown(self, sessions: Collection[str]) -> bool:
        """Do that for caches whose size the driver does not tell, once in a while.

        Returns
        -------
        bool
            True if it was done.
        """
        now = time.monotonic()
        if self._meter is None or self.accounts.complete or not sessions:
            return False
        if now - self._emptied_at < BLIND_SECONDS:
            return False
        self._emptied_at = now
        await self.reclaim(sessions)
        return True

    def who_is_outside(self) -> str:
        """Return a clause on the memory that is not of sessions."""
        named = [
            f"{each.command} of {each.user} (pid {each.pid})"
            for each in sorted(self.outside, key=lambda each: -(each.memory or 0))
            if each.memory is None or each.memory >= _WORTH_NAMING
        ]
        who = f": {', '.join(named[:3])}" if named else ""
        return f"processes outside of all sessions use {bytes_text(self.accounts.outside)}{who}"

    def _workers(self) -> dict[str, WorkerMemory]:
        found = {name: each.worker_memory() for name, each in self._tenants.items()}
        found[POOL] = self.pool_memory()
        return {name: each for name, each in found.items() if each is not None}

    def _take(
        self, sample: MemorySample, workers: Mapping[str, WorkerMemory], changed: Collection[str]
    ) -> None:
        known, before = self.outside, self.accounts.outside
        tenants = [*self._tenants.values(), *self._elsewhere()]
        # One that still loads its state is in no account yet; its grant and estimate count.
        here = {pid for each in workers.values() for pid in each.pids}
        elsewhere = {pid for each in tenants for pid in each.pids} - here
        self.accounts.take(sample, workers, elsewhere, changed)
        others = self.accounts.others.items()
        self.outside = [OutsideProcess.of(pid, count) for pid, count in sorted(others)]
        self._charge()
        same = [each.pid for each in known] == [each.pid for each in self.outside]
        if not same or abs(self.accounts.outside - before) >= _WORTH_NAMING:
            self.on_change()

    def _charge(self) -> None:
        for name, account in self.accounts.workers.items():
            self._ledger.charge(name, account.charge)
        self._ledger.outside = self.accounts.outside
