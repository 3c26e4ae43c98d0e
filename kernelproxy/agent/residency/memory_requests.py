"""The client's requests for device memory, and long work during which they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from kernelproxy.agent.devices.device_allocator import GrantAnswer
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.shared_pages import MemoryRequest

T = TypeVar("T")


class MemoryRequests:
    """Grants memory to one session. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    lease : DeviceLease
    """

    def __init__(
        self, core: SessionCore, state: DeviceState, demand: WorkerDemand, lease: DeviceLease
    ) -> None:
        self._core, self._state, self._demand, self._lease = core, state, demand, lease

    def refuse_impossible(self) -> None:
        """Refuse a request that exceeds the limit, at once and without waiting for a worker."""
        state = self._state
        if (memory_request := state.memory_request) and memory_request.bytes > state.memory_limit:
            self.publish(state.memory.agent.memory_granted, memory_request)

    def cut_to_limit(self) -> None:
        """Take back what exceeds the limit, as far as it is not in use."""
        limit = self._state.memory_limit
        if self._state.memory.agent.memory_granted > limit:
            self.cut(limit)

    def cut(self, grant: int) -> int:
        """Lower the grant to `grant`, or to what is used by now; return the bytes freed."""
        core = self._core
        before = core.allocator.ledger.of(core.id)
        after = self._state.cut_grant(grant)
        core.allocator.ledger.hold(core.id, after)
        return before - after

    async def answer(self) -> bool:
        """Answer the client's request.

        Returns
        -------
        bool
            False if there is no room for it while the session and its neighbours are resident.
        """
        state, core = self._state, self._core
        memory_request = state.memory_request
        if memory_request is None:
            return True
        if state.memory.agent.memory_granted < memory_request.bytes <= state.memory_limit:
            if core.allocator.used_elsewhere(core.tenant) + memory_request.bytes > state.quota:
                return False  # it waits, or the scheduler evicts other sessions of its user
            answer = await core.allocator.reserve(core.tenant, memory_request.bytes, queued=False)
            alone = core.allocator.ledger.most(core.id)
            if answer is GrantAnswer.LATER:
                return True
            if answer is GrantAnswer.DENIED and memory_request.bytes <= alone:
                return False
        self.publish(core.allocator.ledger.of(core.id), memory_request)
        return True

    def publish(self, grant: int, answered: MemoryRequest | None) -> None:
        """Publish the client's grant, and the request which that answers."""
        self._state.set_grant(grant, self._core.allocator.ledger.free, answered)

    async def run_granting(self, work: Coroutine[None, None, T]) -> T:
        """Run work whose duration depends on the size of the state; grant memory meanwhile."""
        core, task = self._core, asyncio.create_task(work)
        try:
            while not task.done():
                wakeup = asyncio.create_task(core.wakeup.wait())
                await asyncio.wait({task, wakeup}, return_when=asyncio.FIRST_COMPLETED)
                wakeup.cancel()
                if core.wakeup.is_set():
                    core.wakeup.clear()
                    self._state.memory.agent.ring()  # Note [Reconciling]
                    if self._demand.wants_worker():
                        self._lease.ask()
                    await self._lease.start()
                    if not await self.answer():
                        self._state.expedite()
                        core.reconcile_due.set()  # reconcile afterwards: it lacks memory
        except BaseException:
            task.cancel()
            await asyncio.wait({task})
            raise
        return task.result()
