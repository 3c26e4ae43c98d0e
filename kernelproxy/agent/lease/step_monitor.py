"""Monitor of a session's progress while it has a lease; reports it to the scheduler.

Its worker records which operators it executes, and finds the step that they repeat (`Steps` in
`native/worker/loop/steps.h`). The agent polls it for that step. The rate of steps depends on which
other sessions execute on the device, so steps are counted from when that set last changed.

Note [Backlog]: a program continues while its session waits for a lease, and its log grows. To
execute this backlog takes only as long as the device needs, which says nothing about the speed of
the program. So steps are counted from when the backlog was executed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.scheduler_api import Arbiter

#: Interval in seconds at which a session that executes is polled.
POLL_SECONDS = 0.5
#: The speed of a session is known after so many steps that took so many seconds.
STEPS_MIN, STRETCH_SECONDS_MIN = 2, 0.3


@dataclass(frozen=True)
class MeasuredStep:
    """The step that a session repeats.

    Parameters
    ----------
    records : int
        Length of the step.
    seconds : float
        Average duration of a step, since these sessions have executed on the device.
    nadir : float
        Point in the step where it uses least memory: a fraction of its records, in [0, 1).
    memory_min : int
        Bytes in use there.
    company : frozenset of str
        Ids of the sessions that had leases on the device then, itself included.
    """

    records: int
    seconds: float
    nadir: float
    memory_min: int
    company: frozenset[str]


class StepMonitor:
    """Monitors one session.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    arbiter : Arbiter
    """

    def __init__(self, core: SessionCore, state: DeviceState, arbiter: Arbiter) -> None:
        self._core, self._state, self._arbiter = core, state, arbiter
        #: As last observed; None if nothing repeats.
        self.step: MeasuredStep | None = None
        self._allocator: DeviceAllocator | None = None
        self._polling: asyncio.Task[None] | None = None
        self._backlog: int | None = None  # end of the backlog, until that is executed
        self._since = 0.0  # when the backlog was executed
        self._alone = 0  # records of the step that was measured without other sessions
        self._counted = 0.0  # seconds of execution reported to the scheduler so far

    def begin(self) -> None:
        """Start monitoring: the session may execute from now on."""
        self.end()
        self._allocator = self._core.allocator
        self._allocator.enter(self._core.id)
        self._backlog = self._state.memory.client.head
        if not self._arbiter.keeps:
            self._polling = asyncio.create_task(self._poll())

    def end(self) -> None:
        """Stop monitoring: the session does not execute any more. Idempotent."""
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None
        if self._allocator is not None:
            self._allocator.leave(self._core.id)
            self._allocator = None

    @property
    def memory(self) -> int:
        """Bytes that it uses or waits for; bounded, as its client is not trusted to be right."""
        state = self._state
        used = max(
            state.memory.client.memory_used,
            state.memory_request.bytes if state.memory_request else 0,
        )
        return min(used, self._core.allocator.device.memory_total)

    def company(self) -> list[str]:
        """Return the ids of the other sessions that may execute on its device now."""
        others = self._allocator.lessees if self._allocator is not None else ()
        return [each for each in others if each != self._core.id]

    def measure(self) -> None:
        """Report to the scheduler what it has used, and how fast it is."""
        executed, step = self._state.busy_seconds, self._comparable()
        used, self._counted = max(executed - self._counted, 0.0), executed
        self._arbiter.measured(
            self._core.id,
            self.memory,
            used,
            step.seconds if step is not None else None,
            step.nadir if step is not None else None,
        )

    def _comparable(self) -> MeasuredStep | None:
        """Return its step if that was measured beside the same sessions as now, else None.

        Beside others, only a step that was measured alone, too, shows what the others cost.
        """
        step, others = self.step, self.company()
        if step is None or step.company != frozenset((self._core.id, *others)):
            return None
        return None if others and step.records != self._alone else step

    async def _poll(self) -> None:
        """Poll the worker's progress while the lease is held."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._observe()
            self.measure()

    async def _observe(self) -> None:
        if (
            self._allocator is not None and self._allocator is not self._core.allocator
        ):  # it has migrated
            self._allocator.leave(self._core.id)
            self._allocator = self._core.allocator
            self._allocator.enter(self._core.id)
        allocator, worker = self._allocator, self._state.worker
        if allocator is None or worker is None or not self._caught_up():
            return
        started = time.monotonic()
        found = await worker.observe(max(allocator.lessees_since, self._since))
        if found is None or allocator.lessees_since > started:
            return
        if not found.records:
            self.step = None
        elif found.made >= STEPS_MIN * found.records and found.seconds >= STRETCH_SECONDS_MIN:
            if len(allocator.lessees) == 1:
                self._alone = found.records
            self.step = MeasuredStep(
                found.records,
                found.seconds * found.records / found.made,
                found.nadir / found.records,
                found.memory_min,
                frozenset(allocator.lessees),
            )

    def _caught_up(self) -> bool:
        """Return True if it has executed what its log had at the start; see Note [Backlog]."""
        if self._backlog is not None:
            if self._state.memory.worker.consumed < self._backlog:
                return False
            self._backlog, self._since = None, time.monotonic()
        return True
