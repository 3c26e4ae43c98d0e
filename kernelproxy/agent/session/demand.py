"""Demand of a session for a worker: whether there is work for one, and what defers it.

Two things defer it: a hold of its user (Note [Holding]), and a pause after a failed attempt.

Note [Postponing]: a state that can be rebuilt is never thrown away. If no worker can be started (an
environment without torch, no descriptors, no memory), or if workers die again and again, the
session gives up its lease and its device memory, is queued with that reason, and retries after a
pause, which grows each time. A cell that its user runs, and `resume`, end the pause at once.
"""

from __future__ import annotations

import asyncio
import time

from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import SuspendHold
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.crash_policy import pause


class WorkerDemand:
    """Tells whether one session needs a worker, and when it tries to get one.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    """

    def __init__(self, core: SessionCore, state: DeviceState) -> None:
        #: True if it must have a worker, even if the log is drained.
        self.needed = False
        self.hold: SuspendHold | None = None
        #: True if its worker died, and the next one is not there yet.
        self.died = False
        #: Why its worker died, if that is known: a sentence.
        self.why_died = ""
        #: Failed attempts since it last had a worker.
        self.vain = 0
        #: Why it waits for the next attempt and not for a device; "" if it does not.
        self.obstacle = ""
        #: Since when it has been queued for room on its device.
        self.queued_since: float | None = None
        self._core, self._state = core, state
        self._again: float | None = None  # when to try next, by the monotonic clock
        self._cell_stamp = 0  # when a cell had last begun or ended at the previous attempt
        self._timer: asyncio.TimerHandle | None = None

    def wants_worker(self) -> bool:
        """Return True if there is work for a worker; end a hold that is over (Note [Holding])."""
        state = self._state
        if self._core.state is State.FAILED:
            return False
        wanted = self.needed or not state.drained or state.wants_memory
        if self.hold is None or not wanted:
            return wanted
        if self.hold.is_over(state) or self._core.inhibited(Inhibitor.CHECKPOINT_REQUEST):
            self.hold = None
        return self.hold is None

    def lost(self) -> None:
        """Note that its worker is gone, with all that was not saved."""
        self.needed = self.died = True

    def new_hold(self, *, by_kernel: bool, by: str = "") -> SuspendHold:
        """Return a hold from now on; `by`: name of the user, `by_kernel`: from inside a cell."""
        client = self._state.memory.client
        return SuspendHold(
            by_kernel,
            client.cell_changed_ns,
            client.head,
            in_cell=client.cells_running > 0,
            by=by,
            at=time.time(),
        )

    def hold_until_next_cell(self) -> None:
        """Let only the next cell, or `resume`, have a worker: there is none to be had now."""
        client = self._state.memory.client
        self.hold = SuspendHold(False, client.cell_changed_ns or 1, client.head)

    # ---------------------------------------------------------------- the next attempt

    @property
    def paused(self) -> bool:
        """True if the next attempt is later; then nothing was run since the last one."""
        if self._again is None:
            return False
        stamp = self._state.memory.client.cell_changed_ns
        return time.monotonic() < self._again and self._cell_stamp == stamp

    def pause(self, why: str, seconds: float | None) -> None:
        """Make the next attempt later.

        Parameters
        ----------
        why : str
            A sentence.
        seconds : float or None
            None: a pause that grows with each failed attempt.
        """
        self.vain += 1
        seconds = pause(self.vain) if seconds is None else seconds
        self.needed = True
        self._again = time.monotonic() + seconds
        self._cell_stamp = self._state.memory.client.cell_changed_ns
        at = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        self.obstacle = f"{why} Nothing is lost. Next try at {at}, or when you run a cell."
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._core.request_reconcile)

    def expedite(self) -> None:
        """End the pause before the next attempt."""
        self._again, self.obstacle = None, ""
        self._cancel_timer()

    def close(self) -> None:
        """Cancel the next attempt: its session ends."""
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave_queue(self) -> None:
        """Leave the queue for room, so that others can have it."""
        self.queued_since = None
        self._core.allocator.leave_queue(self._core.tenant)
