"""Starting a session's worker: from its zygote, with the state that may still be on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill.spill_store import SpillStore
from kernelproxy.agent.state.context_pool import ContextPool, PooledSource, WorkerSource
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.zygotes import Zygote, Zygotes
from kernelproxy.common.errors import DeviceFullError, StoreError, WorkerDiedError, WorkerError
from kernelproxy.devices import Device

log = logging.getLogger(__name__)

START_ATTEMPTS_MAX = 10
START_REFUSALS_MAX = 3


class WorkerStarter:
    """Starts the workers of one session.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    idle : IdleTimer
    kernel : KernelConnection
    zygotes : Zygotes
    cold : SpillStore
    settings : AgentSettings
    contexts : mapping of str to ContextPool
        By device.
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        idle: IdleTimer,
        kernel: KernelConnection,
        zygotes: Zygotes,
        cold: SpillStore,
        settings: AgentSettings,
        contexts: Mapping[str, ContextPool],
    ) -> None:
        self._core, self._state, self._idle, self._kernel = core, state, idle, kernel
        self._zygotes, self._cold, self._settings = zygotes, cold, settings
        self._contexts = contexts
        state.make_room = self._make_room

    async def _make_room(self, device: Device) -> None:
        for allocator in self._core.allocator.allocators:
            if allocator.device.id == device.id:
                await allocator.empty_caches(self._core.tenant)

    async def zygote(self) -> Zygote:
        """Return the zygote for its worker; raises WorkerError."""
        return await self._zygotes.get(self._core.python, self._kernel.torch_version)

    async def prepare(self) -> None:
        """Start its zygote in the shared daemon, before it holds anything that others wait for.

        This may take as long as it likes.
        """
        if self._core.shared and self._state.worker is None:
            with contextlib.suppress(WorkerError):  # reported at the next attempt
                await self.zygote()

    async def _source_in_time(self) -> WorkerSource:
        """Return what forks its worker, with a time limit in the shared daemon.

        The session holds device memory meanwhile. Raises WorkerError.
        """
        limit = self._settings.order_seconds if self._core.shared else None
        try:
            async with asyncio.timeout(limit):
                zygote = await self.zygote()
        except TimeoutError as error:
            raise WorkerError(f"{self._core.python} does not start.") from error
        pool = self._contexts.get(self._core.allocator.device.id)
        return zygote if pool is None else PooledSource(zygote, pool)

    async def start(self, *, once: bool) -> str:
        """Start a worker; return why that failed, as a clause, or "".

        Parameters
        ----------
        once : bool
            True if there is one attempt only.

        Raises
        ------
        StoreError
            If its state is on disk and cannot be read.
        """
        core, state, refusals, emptied = self._core, self._state, 0, False
        for attempt in range(1, START_ATTEMPTS_MAX + 1):
            try:
                state.disk.fetch(self._cold, core.request_reconcile)
                await state.start_worker(await self._source_in_time(), core.request_reconcile)
                break
            except StoreError:
                raise
            except DeviceFullError as error:
                log.warning("Session %s: attempt %d to start: %s", core.id, attempt, error)
                if emptied:
                    return str(error).partition("\n")[0].rstrip(".")
                emptied = True
                await core.allocator.empty_caches(core.tenant)
            except (WorkerError, OSError, MemoryError) as error:
                if state.disk.error is not None:
                    raise state.disk.error from error
                log.warning("Session %s: attempt %d to start: %s", core.id, attempt, error)
                refusals += not isinstance(error, WorkerDiedError)
                if attempt == START_ATTEMPTS_MAX or refusals == START_REFUSALS_MAX or once:
                    return str(error).rstrip(".") or "out of memory"
        self._idle.note_use()
        return ""
