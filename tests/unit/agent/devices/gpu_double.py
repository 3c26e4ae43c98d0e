"""Double of a GPU's memory as its driver reports it, with workers that keep caches there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.devices.memory_accounts import WorkerMemory
from kernelproxy.agent.devices.memory_grants import Neighbour
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices import Device
from kernelproxy.devices.memory_meter import MemorySample

MIB = 1 << 20


@dataclass
class GpuDouble:
    """A GPU, as its driver sees it. In a container (`hidden`) it lists no processes."""

    total: int
    workers: list[GpuSession] = field(default_factory=list)
    others: dict[int, int | None] = field(default_factory=dict)
    hidden = False
    silent = False
    measured = 0

    @property
    def used(self) -> int:
        """Bytes in use."""
        others = sum(each or 0 for each in self.others.values())
        return others + sum(each.on_gpu for each in self.workers)

    def measure(self) -> MemorySample | None:
        """See `MemoryMeter`."""
        self.measured += 1
        if self.silent:
            return None
        listed = {each.pid: each.on_gpu for each in self.workers if each.on_gpu}
        return MemorySample(self.total, self.used, {} if self.hidden else {**self.others, **listed})


class GpuSession:
    """A session on the GPU: its storages, its cache and its context."""

    kept, owner, user, suspend_failure = 0, 0, "ada", ""
    lock_taken = wants_turns = False

    def __init__(self, allocator: DeviceAllocator, gpu: GpuDouble, name: str, context: int) -> None:
        self.id = self.name = name
        self.allocator, self.gpu, self.pid = allocator, gpu, 1000 + len(gpu.workers)
        self.context_bytes, self.storages, self.cache, self.resident = context, 0, 0, False
        self.busy = False
        #: Bytes of its cache that are parts of blocks in use.
        self.fragments = 0
        self.given_back = self.suspended = 0
        self.obeys = True
        self.memory_limit = allocator.ledger.total
        gpu.workers.append(self)
        me: Any = self
        allocator.tenants[name] = me

    @property
    def on_gpu(self) -> int:
        """Bytes that its process has on the GPU."""
        return self.context_bytes + self.storages + self.cache if self.resident else 0

    @property
    def grant(self) -> int:
        """Bytes granted to it."""
        return self.allocator.ledger.of(self.id)

    @property
    def used(self) -> int:
        """See `Tenant`."""
        return self.storages

    @property
    def pids(self) -> frozenset[int]:
        """See `MeasuredTenant`."""
        return frozenset({self.pid}) if self.resident else frozenset()

    def worker_memory(self) -> WorkerMemory | None:
        """See `MeasuredTenant`."""
        return WorkerMemory(self.pids, self.storages, self.grant) if self.resident else None

    async def give_back_cache(self) -> int | None:
        """See `MeasuredTenant`."""
        self.given_back += 1
        if not self.obeys:
            return None
        self.cache = self.fragments
        return self.cache

    def as_neighbour(self) -> Neighbour | None:
        """See `Tenant`."""
        if not self.resident:
            return None
        used = self.grant if self.busy else self.storages
        return Neighbour(self.id, self.grant, used, None if self.busy else 0.0)

    def cut_grant(self, grant: int) -> int:
        """See `Tenant`."""
        before, after = self.grant, max(grant, self.storages)
        self.allocator.ledger.hold(self.id, after)
        return before - after

    async def suspend_for(self, other: str) -> bool:
        """See `Tenant`."""
        self.suspended += 1
        self.resident, self.storages, self.cache = False, 0, 0
        me: Any = self
        self.allocator.release(me)
        return True

    def request_reconcile(self) -> None:
        """See `Tenant`."""

    async def need(self, count: int) -> GrantAnswer:
        """Ask for so many bytes in all, and start a worker if there is none."""
        me: Any = self
        answer = await self.allocator.reserve(me, count, queued=not self.resident)
        if answer is GrantAnswer.GRANTED:
            self.resident = True
        else:
            self.allocator.leave_queue(me)
        return answer

    def use(self, count: int) -> None:
        """Take storages of so many bytes in all, from the cache first."""
        grown = count - self.storages
        self.cache, self.storages = max(0, self.cache - grown), count


def gpu_of(total: int, reserved: int = 0, step: int = MIB) -> tuple[GpuDouble, DeviceAllocator]:
    """Return a GPU and its allocator; sessions may have all but `reserved` bytes."""
    gpu = GpuDouble(total)
    device = Device(
        "cuda:0", DeviceKind.CUDA, "Fake", total - reserved, 0, "cuda:0", visible="GPU-1",
        memory_physical=total,
    )  # fmt: skip
    return gpu, DeviceAllocator(device, step, gpu)


def play(scenario: Any) -> None:
    """Run an asynchronous test."""
    asyncio.run(scenario())
