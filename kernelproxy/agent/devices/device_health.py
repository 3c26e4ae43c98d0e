"""Health of the devices: which of them failed, and are out of use.

Note [Failed devices]: NVML is asked about all GPUs once in `POLL_SECONDS`, and at once when a
worker has lost its device. A GPU of which it reports a fault is out of use until it reports none
any more. A device that `LOSERS_MIN` sessions have lost within `LOSS_SECONDS`, by errors for which
no program is to blame, is out of use too, until the agent is started again: then nothing reports
that it is in order. A fault of a program is no sign of a bad device. In the shared daemon these
must be sessions of different users, who could otherwise take devices from each other by false
reports.

The sessions on a device that failed move to others, or wait. Without a scheduler, a failure is only
reported: all sessions may execute then, each on its own device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.common.protocol import HARDWARE_FAULTS, DeviceLost
from kernelproxy.common.readable import device_name
from kernelproxy.devices import cuda

log = logging.getLogger(__name__)

POLL_SECONDS = 60.0
LOSERS_MIN = 2
LOSS_SECONDS = 600.0

#: Returns the faults of GPUs by UUID, as clauses; takes the UUIDs.
Ask = Callable[[list[str]], dict[str, str]]


class DeviceHealth:
    """Notes failures of devices, in `DeviceAllocator.failure`, and when they are over.

    Parameters
    ----------
    allocators : mapping
        All devices, by id.
    on_failed, on_healed : callable
        Called with a device when it fails, and when it can be used again.
    ask : callable
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        allocators: Mapping[str, DeviceAllocator],
        on_failed: Callable[[DeviceAllocator], object],
        on_healed: Callable[[DeviceAllocator], object],
        ask: Ask = cuda.faults,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocators, self._on_failed, self._on_healed = allocators, on_failed, on_healed
        self._ask, self._clock = ask, clock
        self._losses: dict[str, dict[str, float]] = {}  # by device and party: when it lost it last
        self._reported: set[str] = set()  # devices with a fault that NVML has reported
        self._due = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        for allocator in allocators.values():
            allocator.on_loss = self._note_loss

    def begin(self) -> None:
        """Poll from now on, if there are GPUs."""
        if any(each.device.visible for each in self._allocators.values()):
            self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop polling."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait({self._polling})

    def _note_loss(self, allocator: DeviceAllocator, party: str, lost: DeviceLost) -> None:
        self._due.set()
        if lost.code not in HARDWARE_FAULTS:
            return
        now, losses = self._clock(), self._losses.setdefault(allocator.device.id, {})
        losses[party] = now
        recent = [each for each in losses.values() if now - each <= LOSS_SECONDS]
        if len(recent) >= LOSERS_MIN:
            self._fail(allocator, f"several sessions have lost it ({lost.message})")

    async def _poll(self) -> None:
        while True:
            self._due.clear()  # a loss during the check is followed by another one
            try:
                await self.check()
            except Exception as error:  # of a driver: whatever it is, it is no reason to end this
                log.warning("The GPUs' health is unknown: %s", error)
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def check(self) -> None:
        """Ask NVML about all GPUs.

        Raises
        ------
        DeviceError
            If it does not answer; then nothing changes.
        """
        gpus = {each.device.visible: each for each in self._allocators.values()}
        gpus.pop("", None)
        faults = await asyncio.to_thread(self._ask, list(gpus))
        for uuid, allocator in gpus.items():
            if fault := faults.get(uuid):
                self._reported.add(allocator.device.id)
                self._fail(allocator, fault)
            elif allocator.device.id in self._reported:
                self._reported.discard(allocator.device.id)
                self._heal(allocator)

    def _fail(self, allocator: DeviceAllocator, why: str) -> None:
        if allocator.failure:
            return
        allocator.failure = f"{device_name(allocator.device.id)} is out of use: {why}."
        log.error("%s", allocator.failure)
        self._on_failed(allocator)

    def _heal(self, allocator: DeviceAllocator) -> None:
        log.info("%s can be used again", device_name(allocator.device.id))
        allocator.failure = ""
        self._losses.pop(allocator.device.id, None)
        self._on_healed(allocator)
