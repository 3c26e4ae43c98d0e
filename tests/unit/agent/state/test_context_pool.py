"""A context in advance: made when the device is quiet, given to a session, or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kernelproxy.agent.devices import memory_accounts
from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.state import context_pool
from kernelproxy.agent.state.context_pool import ContextPool
from kernelproxy.common.errors import WorkerError
from tests.unit.agent.devices.gpu_double import MIB, GpuDouble, GpuSession, gpu_of, play

CONTEXT_BYTES = 100 * MIB


class WarmWorker:
    """A worker that has a context on the GPU as soon as it is warm."""

    def __init__(self, gpu: GpuDouble, pid: int, on_change: Callable[[], object]) -> None:
        self.gpu, self.pid, self.on_change = gpu, pid, on_change
        self.exited, self.closed = asyncio.Event(), False
        self.hold = asyncio.Event()  # set: it is warm as soon as it is asked
        self.hold.set()
        self.fails = False

    async def warm(self, device: str, visible: str, title: str, seconds: float) -> None:
        """Make a context."""
        assert (device, visible) == ("cuda:0", "GPU-1")
        await self.hold.wait()
        if self.fails:
            raise WorkerError("out of memory")
        self.gpu.others[self.pid] = CONTEXT_BYTES

    def assign(self, on_change: Callable[[], object]) -> None:
        """See `Worker`."""
        self.on_change = on_change

    async def kill(self) -> None:
        """See `Worker`."""
        self.gpu.others.pop(self.pid, None)
        self.exited.set()

    def close(self) -> None:
        """See `Worker`."""
        self.closed = True


class WarmZygote:
    """Forks such workers."""

    dead = False

    def __init__(self, gpu: GpuDouble) -> None:
        self.gpu = gpu
        self.workers: list[WarmWorker] = []
        self.slow = self.fails = False

    async def spawn(self, on_change: Callable[[], object]) -> Any:
        """See `Zygote`."""
        worker = WarmWorker(self.gpu, 5000 + len(self.workers), on_change)
        worker.fails = self.fails
        if self.slow:
            worker.hold.clear()
        self.workers.append(worker)
        return worker


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_pool, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(memory_accounts, "CONTEXT_BYTES", CONTEXT_BYTES)


def pool_of(total: int) -> tuple[GpuDouble, DeviceAllocator, ContextPool, WarmZygote]:
    gpu, allocator = gpu_of(total)
    pool = ContextPool(allocator.device, allocator.measured, allocator.ledger)
    allocator.spare = pool
    return gpu, allocator, pool, WarmZygote(gpu)


async def settled(pool: ContextPool) -> None:
    """Wait until the pool has nothing to do."""
    while pool._timer is not None:
        await asyncio.sleep(0)
    if pool._making is not None:
        await asyncio.wait({pool._making})


def nothing() -> None:
    """Ignore a change."""


def test_the_next_session_of_a_zygote_gets_the_worker_with_a_context() -> None:
    async def scenario() -> None:
        _, allocator, pool, zygote = pool_of(1000 * MIB)
        first: Any = await pool.spawn(zygote, nothing)
        await settled(pool)
        assert pool.memory() is not None
        second: Any = await pool.spawn(zygote, nothing)
        assert [first, second] == zygote.workers
        assert second.pid in zygote.gpu.others
        assert pool.memory() is None
        assert allocator.ledger.free == 1000 * MIB  # what it takes is charged to its session
        await pool.close()

    play(scenario)


def test_a_context_in_advance_is_in_the_account_and_is_not_outside() -> None:
    async def scenario() -> None:
        gpu, allocator, pool, zygote = pool_of(1000 * MIB)
        await pool.spawn(zygote, nothing)
        await settled(pool)
        await allocator.measured.refresh()
        assert gpu.used == CONTEXT_BYTES
        assert allocator.measured.outside == []
        assert allocator.ledger.outside == 0
        assert allocator.ledger.free == 900 * MIB
        await pool.close()
        await allocator.measured.refresh()
        assert allocator.ledger.free == 1000 * MIB

    play(scenario)


@pytest.mark.parametrize("making", [False, True])
def test_a_context_in_advance_ends_when_a_session_needs_its_memory(making: bool) -> None:
    async def scenario() -> None:
        gpu, allocator, pool, zygote = pool_of(1000 * MIB)
        await pool.spawn(zygote, nothing)
        zygote.slow = making
        if making:
            pool._make()
            await asyncio.sleep(0)
            while len(zygote.workers) < 2:
                await asyncio.sleep(0)
        else:
            await settled(pool)
        session = GpuSession(allocator, gpu, "a", CONTEXT_BYTES)
        assert await session.need(850 * MIB) is GrantAnswer.GRANTED
        assert pool.memory() is None
        assert zygote.workers[1].closed
        await pool.close()

    play(scenario)


def test_a_context_in_advance_ends_when_a_session_finds_its_device_full() -> None:
    async def scenario() -> None:
        gpu, allocator, pool, zygote = pool_of(1000 * MIB)
        await pool.spawn(zygote, nothing)
        await settled(pool)
        session: Any = GpuSession(allocator, gpu, "a", CONTEXT_BYTES)
        await allocator.empty_caches(session)
        assert gpu.used == 0
        await pool.close()

    play(scenario)


def test_no_context_is_made_without_much_free_memory() -> None:
    async def scenario() -> None:
        gpu, allocator, pool, zygote = pool_of(1000 * MIB)
        session = GpuSession(allocator, gpu, "a", CONTEXT_BYTES)
        assert await session.need(750 * MIB) is GrantAnswer.GRANTED
        await pool.spawn(zygote, nothing)
        await settled(pool)
        assert pool.memory() is None
        assert len(zygote.workers) == 1
        await pool.close()

    play(scenario)


def test_a_context_of_another_zygote_is_replaced() -> None:
    async def scenario() -> None:
        gpu, _, pool, zygote = pool_of(1000 * MIB)
        other = WarmZygote(gpu)
        await pool.spawn(zygote, nothing)
        await settled(pool)
        found: list[Any] = [await pool.spawn(other, nothing)]
        await settled(pool)
        assert zygote.workers[1].closed
        found.append(await pool.spawn(other, nothing))
        assert found == other.workers
        await pool.close()

    play(scenario)


def test_a_worker_that_fails_or_dies_in_advance_leaves_nothing() -> None:
    async def scenario() -> None:
        _, allocator, pool, zygote = pool_of(1000 * MIB)
        zygote.fails = True
        await pool.spawn(zygote, nothing)
        await settled(pool)
        assert pool.memory() is None
        assert zygote.workers[1].closed
        zygote.fails = False
        pool.note_use()
        await settled(pool)
        (dead,) = zygote.workers[2:]
        await dead.kill()
        dead.on_change()
        assert pool.memory() is None
        assert dead.closed
        assert allocator.ledger.free == 1000 * MIB
        await pool.close()

    play(scenario)
