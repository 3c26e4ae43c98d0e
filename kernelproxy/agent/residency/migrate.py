"""Migrating a session to another device."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.memory_requests import MemoryRequests
from kernelproxy.agent.residency.worker_sources import WorkerSources
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.states import State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.migration import Migration, migrate
from kernelproxy.common.errors import ControlError, WorkerError
from kernelproxy.common.readable import device_name
from kernelproxy.common.units import bytes_text

log = logging.getLogger(__name__)


class Migrator:
    """Migrates one session. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    lease : DeviceLease
    memory : MemoryRequests
    sources : WorkerSources
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        lease: DeviceLease,
        memory: MemoryRequests,
        sources: WorkerSources,
    ) -> None:
        self._core, self._state, self._lease = core, state, lease
        self._memory, self._sources = memory, sources
        #: Cost of its last migration.
        self.last: Migration | None = None

    async def migrate(self, allocator: DeviceAllocator, check: Callable[[], None]) -> None:
        """Migrate it to a device, unless it is there.

        A session without a worker is only reassigned. `check` is called just before it is
        migrated; if it raises, the session stays where it is.
        """
        core = self._core
        if allocator is core.allocator:
            return
        moved = f"Moved from {_name(core.allocator)} to {_name(allocator)}."
        if self._state.worker is None:
            self._settle_in(allocator)
        else:
            await self._move_to(allocator, check)
        core.happened("migrated", moved)

    async def prepare(self, allocator: DeviceAllocator) -> None:
        """Shorten a migration to a device that is expected soon; it continues to execute.

        Raises WorkerError.
        """
        if allocator is not self._core.allocator:
            await self._memory.run_granting(self._state.preallocate())
            log.info("Session %s is prepared to move to %s", self._core.id, allocator.device.id)

    async def _move_to(self, allocator: DeviceAllocator, check: Callable[[], None]) -> None:
        """Migrate its worker's state to a device, or leave it where it was."""
        core, state = self._core, self._state
        here = core.allocator

        def check_again() -> None:
            check()
            grant = here.ledger.of(core.id)
            if allocator.ledger.short(core.id, grant):
                raise ControlError(f"{_name(allocator)} has too little free memory.", "no-room")
            allocator.ledger.hold(core.id, grant)
            self._lease.pause()

        need = here.ledger.of(core.id)
        if await allocator.reserve(core.tenant, need, queued=True) is not GrantAnswer.GRANTED:
            raise ControlError(
                f"{_name(allocator)} has too little free memory: session {core.id} needs "
                f"{bytes_text(need)}.",
                "no-room",
            )
        try:
            source = await self._sources.on(allocator.device)
            core.set_state(
                State.MIGRATING,
                f"Moving from {_name(here)} to {_name(allocator)}. Cells keep running.",
            )
            self.last = await self._memory.run_granting(
                migrate(state, source, allocator.device, check_again, core.request_reconcile)
            )
        except WorkerError as error:
            raise ControlError(
                f"Session {core.id} could not be moved and stays on {_name(here)}: {error}",
                "failed",
            ) from error
        finally:
            if state.device is allocator.device:
                self._settle_in(allocator)
            else:
                allocator.release(core.tenant)
                await self._lease.enable_again()
            if core.state is State.MIGRATING:
                core.set_state(State.RUNNING, reasons.RUNNING)

    def _settle_in(self, allocator: DeviceAllocator) -> None:
        """Assign the session to a device."""
        core, state, tenant = self._core, self._state, self._core.tenant
        core.allocator.leave_queue(tenant)
        del core.allocator.tenants[core.id]
        core.allocator.release(tenant)
        core.allocator.decided(tenant)
        allocator.tenants[core.id] = tenant
        core.allocator = allocator
        core.persist()
        core.note_state()
        self._lease.pause(over=True)
        self._lease.moved(resident=state.worker is not None)
        if state.device is not allocator.device:
            state.settle_on(allocator.device)
            state.memory.agent.ring()


def _name(allocator: DeviceAllocator) -> str:
    """Return the user-facing name of a device."""
    return device_name(allocator.device.id)
