"""Context pool: a worker that has a context on a GPU before a session needs one.

To make a CUDA context and to load NVIDIA's libraries takes longer than to load a small state. So
after a session has started or left, a worker without a session does that in advance, while the
device has much free memory; the next session to start there gets it. It is ended as soon as a
session needs the memory. Contexts are pooled as in PhoenixOS (Huang et al., SOSP 2025).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kernelproxy.agent.devices.measured_memory import POOL, MeasuredMemory
from kernelproxy.agent.devices.memory_accounts import WorkerMemory
from kernelproxy.agent.devices.memory_grants import GrantTable
from kernelproxy.agent.workers.seats import WorkerSource
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.common.errors import WorkerError
from kernelproxy.devices import Device

log = logging.getLogger(__name__)

#: Seconds without a start or an end of a worker on the device after which a context is made: that
#: occupies the driver, which others need then.
QUIET_SECONDS = 3.0
#: Seconds for making a context.
WARM_SECONDS = 60.0
#: A context is made only if this part of the device stays free.
FREE_PART = 8


class ContextPool:
    """The context in advance of one GPU.

    Parameters
    ----------
    device : Device
    measured : MeasuredMemory
        Accounts of the device: they count the context.
    ledger : GrantTable
    """

    def __init__(self, device: Device, measured: MeasuredMemory, ledger: GrantTable) -> None:
        self._device, self._measured, self._ledger = device, measured, ledger
        measured.pool_memory = self.memory
        #: Zygote of the last worker that started on the device.
        self._source: WorkerSource | None = None
        #: The worker with a context, and its zygote.
        self._worker: Worker | None = None
        self._made_by: WorkerSource | None = None
        self._making: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def memory(self) -> WorkerMemory | None:
        """Return the figures of its worker, which has no storages; None if there is none."""
        if self._worker is None:
            return None
        return WorkerMemory(frozenset({self._worker.pid}), storages=0, granted=0)

    async def spawn(self, source: WorkerSource, on_change: Callable[[], object]) -> Worker:
        """Return a worker of a zygote, the one with a context if there is one.

        Parameters
        ----------
        source : WorkerSource
        on_change : callable
            See `Zygote.spawn`.

        Raises
        ------
        WorkerError
            As `Zygote.spawn`.
        """
        self._source = source
        self.note_use()
        worker = self._worker
        if worker is None or self._making or self._made_by is not source or worker.exited.is_set():
            return await source.spawn(on_change)
        self._forget()
        worker.assign(on_change)
        return worker

    def note_use(self) -> None:
        """Note that a worker starts or ends on the device: now is no time to make a context."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._make)

    async def give_way(self) -> bool:
        """End its worker, as its memory is needed; return True if there was one."""
        self._stop_timer()
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait({self._making})
            return True
        if self._worker is None:
            return False
        await self._end()
        return True

    async def close(self) -> None:
        """End its worker."""
        await self.give_way()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make(self) -> None:
        self._timer = None
        source, estimate = self._source, self._measured.accounts.estimate
        there = self._worker is not None and self._made_by is source
        room = self._ledger.free - estimate >= self._device.memory_total // FREE_PART
        if source is not None and not (source.dead or there or self._making) and room:
            self._making = asyncio.create_task(self._warm(source))

    async def _warm(self, source: WorkerSource) -> None:
        try:
            await self._end()  # the one of another zygote
            self._ledger.charge(POOL, self._measured.accounts.estimate)
            self._worker, self._made_by = await source.spawn(self._note_exit), source
            device = self._device
            title = f"sing: for the next session on {device.id}"
            await self._worker.warm(device.torch_device, device.visible, title, WARM_SECONDS)
        except WorkerError as error:
            log.info("No context in advance on %s: %s", self._device.id, error)
            await self._end()
        except BaseException:
            await self._end()
            raise
        finally:
            self._making = None

    async def _end(self) -> None:
        worker = self._worker
        if worker is not None:
            await worker.kill()
            worker.close()
        self._forget()

    def _forget(self) -> None:
        """Forget its worker, and what it is charged: it is a session's now, or has ended."""
        self._worker = self._made_by = None
        self._measured.accounts.forget(POOL)
        self._ledger.release(POOL)

    def _note_exit(self) -> None:
        """Forget its worker if it has ended by itself."""
        worker = self._worker
        if worker is not None and self._making is None and worker.exited.is_set():
            worker.close()
            self._forget()


@dataclass(frozen=True)
class PooledSource:
    """A zygote, with the contexts that its workers may have in advance.

    Parameters
    ----------
    zygote : WorkerSource
    pool : ContextPool
    """

    zygote: WorkerSource
    pool: ContextPool

    @property
    def dead(self) -> bool:
        """True if it can fork no worker any more."""
        return self.zygote.dead

    async def spawn(self, on_change: Callable[[], object]) -> Worker:
        """See `ContextPool.spawn`."""
        return await self.pool.spawn(self.zygote, on_change)
