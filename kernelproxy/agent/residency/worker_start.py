"""Starting a session's worker: from its zygote, with the state that may still be on disk."""

from __future__ import annotations

import contextlib
import logging

from kernelproxy.agent.residency.worker_sources import WorkerSources
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.spill.spill_store import SpillStore
from kernelproxy.agent.state.device_state import DeviceState
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
    sources : WorkerSources
    cold : SpillStore
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        idle: IdleTimer,
        sources: WorkerSources,
        cold: SpillStore,
    ) -> None:
        self._core, self._state, self._idle = core, state, idle
        self._sources, self._cold = sources, cold
        state.make_room = self._make_room

    async def _make_room(self, device: Device) -> None:
        for allocator in self._core.allocator.allocators:
            if allocator.device.id == device.id:
                await allocator.empty_caches(self._core.tenant)

    async def prepare(self) -> None:
        """Start its zygote in the shared daemon, before it holds anything that others wait for.

        This may take as long as it likes.
        """
        if self._core.shared and self._state.worker is None:
            with contextlib.suppress(WorkerError):  # reported at the next attempt
                await self._sources.zygote()

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
                await state.start_worker(await self._sources.in_time(), core.request_reconcile)
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
