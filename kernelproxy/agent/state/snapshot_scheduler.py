"""Snapshot scheduler: keeps a session recoverable, as far as its budgets allow.

| when                                          | what                                           |
|-----------------------------------------------|------------------------------------------------|
| it has executed for a while since the last    | a snapshot, so that recovery replays little    |
| its log reaches its budget                    | a snapshot, and the log before it is freed     |
| the same, by an upload (Note [Uploads])       | the same, whatever its share of the time is    |
| it is idle                                    | a snapshot, so that eviction is a drop         |
| it is about to move, or has just moved        | of these, only what its log requires           |
| the log is nearly full, and a snapshot would  | the log is freed without one: it continues and |
| cost more than its share or has no memory     | is not recoverable until the next snapshot     |
| the same, and most of the log is not executed | nothing yet: neither would free much           |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.state.snapshot_budget import LogInflow, SnapshotBudget
from kernelproxy.common.errors import WorkerError
from kernelproxy.common.units import bytes_text

log = logging.getLogger(__name__)

#: Seconds of rest after which an idle session is saved, if it is not suspended before.
REST_SECONDS = 5.0
RETRY_SECONDS = 1.0
#: Seconds until a worker that is behind is checked again.
BEHIND_SECONDS = 0.05
#: Part of the log's capacity at which a session that cannot be saved loses its log.
FULL = 0.75
_NEVER = float("inf")


class SnapshotScheduler:
    """Decides when a session is saved, and triggers reconciling then.

    Parameters
    ----------
    state : DeviceState
    log_budget : int
        Bytes of log at which a snapshot is wanted.
    has_memory : callable
        Returns True if so many more bytes of host memory may be used. It iterates over all
        sessions, so it is called only when a snapshot would be taken.
    check : callable
        Called when something may be due.
    """

    def __init__(
        self,
        state: DeviceState,
        log_budget: int,
        has_memory: Callable[[int], bool],
        check: Callable[[], object],
    ) -> None:
        #: Why the session could not be recovered now; "" if it could.
        self.obstacle = ""
        self._state, self._log_budget = state, log_budget
        self._has_memory, self._check = has_memory, check
        self._cadence, self._inflow = SnapshotBudget(), LogInflow()
        self._timer: asyncio.TimerHandle | None = None
        self._again = 0.0  # seconds until another try, if one is wanted

    async def take_due(self, rested: float, save: Callable[[bool], Awaitable[None]]) -> None:
        """Do what is due.

        Parameters
        ----------
        rested : float
            Seconds for which the session has been idle; 0 if it works.
        save : callable
            Takes a snapshot during execution. Its argument is True if the snapshot may wait for a
            moment when it disturbs least.
        """
        state, self._again = self._state, 0.0
        full = int(FULL * state.memory.log_bytes)
        if not state.saved:
            await self._snapshot_if_due(rested, full, save)
        # A client rings whenever its log is longer than the budget in the page, and when it is
        # full. A client that begins to work again must ring at once. One whose log is too long
        # already must not ring at every record.
        if state.saved and state.drained:
            budget = 0
        elif state.log_bytes <= self._log_budget:
            budget = self._log_budget
        else:
            budget = full if state.log_bytes <= full else state.memory.log_bytes
        state.memory.agent.log_budget = budget

    async def _snapshot_if_due(
        self, rested: float, full: int, save: Callable[[bool], Awaitable[None]]
    ) -> None:
        state, now = self._state, time.monotonic()
        over = state.log_bytes > min(self._log_budget, full)
        left = self._cadence.seconds_left(state.busy_seconds, now)
        if not over and rested < REST_SECONDS and left > 0:
            return
        if not over and state.moving:
            self._again = RETRY_SECONDS
            return
        inflow, is_full, dirty = self._inflow, state.log_bytes > full, state.dirty_bytes
        inflow.note(state.memory.client.head, state.memory.client.operators)
        within = self._cadence.allowed(now)
        behind = 2 * state.executed_bytes < state.log_bytes
        if rested <= 0 and behind and (inflow.is_upload or not within):
            self._again = BEHIND_SECONDS
            return
        worth = inflow.worth_saving(state.log_bytes, dirty, full=is_full)
        allowed = rested > 0 or worth or (within and (is_full or not inflow.is_upload))
        if allowed and self._has_memory(dirty):
            charged = rested <= 0 and not worth
            await self._save(lambda: save(charged and not over), charged=charged)
        elif is_full:
            await self._forgo(
                "The budget of host memory for logs and snapshots is used up."
                if allowed
                else f"It fills its log faster than {bytes_text(state.memory.log_bytes)} between "
                "two snapshots that would take 2 % of its time."
            )

    async def _save(self, save: Callable[[], Awaitable[None]], *, charged: bool) -> None:
        """Take a snapshot; `charged`: its cost delays the next one."""
        state = self._state
        self._inflow.saved(state.memory.client.head, state.memory.client.operators)
        try:
            await save()
        except WorkerError as error:
            log.warning("No snapshot: %s", error)
            self._again = RETRY_SECONDS
            return
        self.obstacle = ""
        cost = state.save_cost if charged else 0.0
        self._cadence.saved(state.busy_seconds, time.monotonic(), cost)

    async def _forgo(self, obstacle: str) -> None:
        self.obstacle = obstacle
        log.warning("The log is freed without a snapshot: %s", obstacle)
        client = self._state.memory.client
        self._inflow.saved(client.head, client.operators)
        await self._state.truncate_unsaved()

    def set_timer(self, rested: float) -> None:
        """Schedule the next check for when, by what is known now, something is due."""
        self._cancel_timer()
        left = self._seconds_left(rested)
        if left != _NEVER:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left, 0.01), self._check)

    def _seconds_left(self, rested: float) -> float:
        if self._again:
            return self._again
        if self._state.worker is None or (self._state.saved and self._state.drained):
            return _NEVER
        if rested > 0:
            return REST_SECONDS - rested if rested < REST_SECONDS else _NEVER
        left = self._cadence.seconds_left(self._state.busy_seconds, time.monotonic())
        return max(left, RETRY_SECONDS)

    def cancel(self) -> None:
        """Cancel the next check: there is no worker."""
        self._cancel_timer()
        if not self._state.closed:
            self._state.memory.agent.log_budget = self._log_budget

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
