"""Restoring a session: it gets a worker, once it has a lease and room on its device.

A failed attempt loses nothing: see Note [Postponing] in `session.demand`.
"""

from __future__ import annotations

import contextlib
import logging
import time

from kernelproxy.agent.devices.device_allocator import GrantAnswer
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.denial import Denial
from kernelproxy.agent.residency.observed_state import ObservedState
from kernelproxy.agent.residency.waiting import WaitReasons
from kernelproxy.agent.residency.worker_start import WorkerStarter
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.states import State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import StoreError
from kernelproxy.common.readable import device_name, turn
from kernelproxy.common.shared_memory import Presence
from kernelproxy.common.units import bytes_text

log = logging.getLogger(__name__)

#: Seconds for which it waits for room while it has a lease; then it gives the lease back.
ROOM_SECONDS = 1.0


class Restorer:
    """Gives one session a worker when it must have one. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    lease : DeviceLease
    waiting : WaitReasons
    observed : ObservedState
    starter : WorkerStarter
    denial : Denial
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        lease: DeviceLease,
        waiting: WaitReasons,
        observed: ObservedState,
        starter: WorkerStarter,
        denial: Denial,
    ) -> None:
        self._core, self._state, self._demand, self._lease = core, state, demand, lease
        self._waiting, self._observed, self._starter = waiting, observed, starter
        self._denial = denial

    async def restore(self) -> None:
        """Restore it, let it wait for a lease, or deny it devices."""
        core, state, demand, lease = self._core, self._state, self._demand, self._lease
        if state.worker is None:
            if demand.paused:
                return lease.stand_back()
            demand.expedite()
        if not lease.held and (why := self._denial.due()):
            return await self._denial.deny(why)
        demand.needed = demand.needed or state.worker is None
        await self._starter.prepare()
        if state.wants_memory:
            lease.monitor.measure()  # the scheduler also counts what it waits for
        lease.ask()
        if not lease.held:
            demand.leave_queue()  # sessions with a lease come first
            if state.worker is None and not core.inhibited(Inhibitor.PIN):
                core.allocator.release(core.tenant)  # they may need the memory of its dead worker
            core.set_state(State.QUEUED, self._waiting.why_queued())
        elif state.worker is None:
            await self._start()
        return None

    async def expedite(self) -> None:
        """Restore it now, without a pause between two attempts, if it has no worker."""
        self._demand.expedite()
        if self._state.worker is None:
            await self.restore()

    async def _start(self) -> None:
        """Start its worker, or queue it for room on its device."""
        core, state, demand = self._core, self._state, self._demand
        allocator, lease = core.allocator, self._lease
        memory_request, need = state.memory_request, self._waiting.need()
        if state.disk.error is not None:
            return await self._strand(state.disk.error)
        demand.needed = True
        if await allocator.reserve(core.tenant, need, queued=True) is not GrantAnswer.GRANTED:
            return self._queue(need)
        demand.queued_since = None
        rebuilt = demand.why_died or reasons.REBUILT
        core.set_state(State.RESTORING, rebuilt if demand.died else reasons.RESTORED)
        demand.died, demand.why_died = False, ""
        state.set_grant(
            allocator.ledger.of(core.id), allocator.ledger.free, memory_request
        )  # replay may need all
        state.announce(Presence.PRESENT)  # from here on the client need not ring
        try:
            failed = await self._starter.start(once=demand.vain > 0)
        except StoreError as error:
            return await self._strand(error)
        if failed:
            return self.postpone(f"The GPU process could not be started: {failed}.")
        demand.needed, demand.vain = False, 0
        if not lease.held:  # any more
            state.announce(Presence.ABSENT)
        self._observed.update()
        return None

    def _queue(self, need: int) -> None:
        """Queue it for `need` bytes on its device."""
        core, state, demand, lease = self._core, self._state, self._demand, self._lease
        allocator = core.allocator
        allocator.ledger.release(core.id)  # it may still hold some if a worker died
        lease.begin_transfer(needed=False)  # from here on its duration is no measure of the device
        state.announce(Presence.ABSENT)
        kept = allocator.kept_from(core.tenant, need) or allocator.suspend_failure(core.tenant)
        place = allocator.enqueue(core.tenant)
        demand.queued_since = demand.queued_since or time.monotonic()
        long = time.monotonic() - demand.queued_since > ROOM_SECONDS
        device, size = device_name(allocator.device.id), bytes_text(need)
        if (kept or long) and lease.scheduled:  # others can use the lease
            demand.leave_queue()
            why = kept or f"{device} has less than {size} free now."
            core.set_state(State.QUEUED, why)
            return lease.cannot(why)
        waits = f"Waiting for {size} on {device}. {turn(place, None)}"
        core.set_state(State.QUEUED, kept or waits)
        return None

    def postpone(self, why: str, seconds: float | None = None) -> None:
        """Queue it until the next attempt to restore it; see Note [Postponing].

        Parameters
        ----------
        why : str
            A sentence.
        seconds : float, optional
            By default a pause that grows with each failed attempt.
        """
        core, demand = self._core, self._demand
        demand.pause(why, seconds)
        demand.leave_queue()
        if not core.inhibited(Inhibitor.PIN):
            core.allocator.release(core.tenant)  # others may use it meanwhile
        self._state.announce(Presence.ABSENT)
        self._lease.stand_back()
        core.set_state(State.QUEUED, demand.obstacle)

    def stand_back(self) -> None:
        """Stop waiting for a worker that is not needed any more."""
        self._demand.needed = False
        self._demand.leave_queue()
        self._lease.stand_back()

    async def _strand(self, error: StoreError) -> None:
        """Leave it on disk because its state cannot be read now, and notify its client."""
        core, state, demand = self._core, self._state, self._demand
        state.drop_worker()
        with contextlib.suppress(StoreError):
            await state.disk.fetched()
        reason = f"The state is on disk and cannot be read: {error}"
        demand.needed, demand.died = False, False
        demand.hold_until_next_cell()
        core.set_state(State.SUSPENDED, reason)
        # The client must not wait in vain; the next cell, or `resume`, retries.
        state.announce(Presence.ENDED, reason)
        core.allocator.release(core.tenant)
