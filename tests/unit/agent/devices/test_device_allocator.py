"""Several sessions that request memory of one device at the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.devices.memory_grants import Neighbour
from kernelproxy.devices import configured_devices

MIB = 1 << 20


class Resident:
    """A session on the device, which can be suspended when its lock is free."""

    kept = 0
    memory_limit = 1 << 40
    owner = 0
    lock_taken = False

    def __init__(self, allocator: DeviceAllocator, name: str, granted: int) -> None:
        self.id = self.name = name
        self.allocator, self.lock, self.looks = allocator, asyncio.Lock(), 0
        self.leaves = asyncio.Event()
        self.busy = False
        allocator.tenants[name] = self.tenant
        allocator.ledger.hold(name, granted)

    @property
    def tenant(self) -> Any:
        """Itself: it has what these calls of the allocator use of a tenant."""
        return self

    def as_neighbour(self) -> Neighbour | None:
        if self.lock.locked():
            return None
        granted = self.allocator.ledger.of(self.id)
        return Neighbour(self.id, granted, granted, None if self.busy else 0.0)

    def cut_grant(self, grant: int) -> int:
        return 0

    async def suspend_for(self, other: str) -> bool:
        async with self.lock:
            await self.leaves.wait()
            self.allocator.release(self.tenant)
        return True

    def request_reconcile(self) -> None:
        self.looks += 1

    async def grow(self, need: int) -> GrantAnswer:
        async with self.lock:
            return await self.allocator.reserve(self.tenant, need, queued=False)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> DeviceAllocator:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:256MiB@1")
    (device,) = configured_devices()
    return DeviceAllocator(device, MIB)


def test_a_growing_session_does_not_block_others(allocator: DeviceAllocator) -> None:
    async def scenario() -> None:
        first, second, third, fourth = (Resident(allocator, name, 60 * MIB) for name in "abcd")
        growing = asyncio.create_task(first.grow(110 * MIB))  # suspends the second one
        while not second.lock.locked():
            await asyncio.sleep(0)
        for each in (third, fourth):
            assert await each.grow(120 * MIB) is GrantAnswer.LATER
            assert each.looks == 0
        second.leaves.set()
        assert await growing is GrantAnswer.GRANTED
        assert [third.looks, fourth.looks] == [1, 1]
        first.busy = True
        fourth.leaves.set()
        # The fourth one can make room, since its own lock is free.
        assert await third.grow(120 * MIB) is GrantAnswer.GRANTED
        assert allocator.ledger.of("d") == 0

    asyncio.run(scenario())
