"""Keeps a session recoverable: snapshots beside its execution, as its budgets allow.

| when                                          | what                                           |
|-----------------------------------------------|------------------------------------------------|
| it has executed for a while since the last    | a snapshot, so that recovery replays little    |
| its log reaches its budget                    | a snapshot, and the log before it is freed     |
| it is idle                                    | a snapshot, so that eviction is a drop         |
| the log is nearly full, and a snapshot would  | the log is freed without one: it goes on and   |
| cost more than its share or has no memory     | is not recoverable until the next snapshot     |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kernelproxy.agent import report
from kernelproxy.agent.cadence import Cadence
from kernelproxy.agent.state import DeviceState
from kernelproxy.errors import WorkerError

log = logging.getLogger(__name__)

#: Seconds of rest after which an idle session is saved, if it is not suspended before.
REST_SECONDS = 5.0
RETRY_SECONDS = 1.0
#: Part of the log's capacity at which a session that cannot be saved loses its log.
FULL = 0.75
_NEVER = float("inf")


class Upkeep:
    """Decides when a session is saved, and asks to be looked at then.

    Parameters
    ----------
    state : DeviceState
    log_budget : int
        Bytes of log at which a snapshot is wanted.
    has_memory : callable
        Whether so many more bytes of host memory may be used.
    look : callable
        Called when it may be time.
    """

    def __init__(
        self,
        state: DeviceState,
        log_budget: int,
        has_memory: Callable[[int], bool],
        look: Callable[[], object],
    ) -> None:
        #: Why the session could not be recovered now; "" if it could.
        self.obstacle = ""
        self._state, self._log_budget = state, log_budget
        self._has_memory, self._look = has_memory, look
        self._cadence = Cadence()
        self._timer: asyncio.TimerHandle | None = None
        self._retry = False

    async def tend(self, rested: float, save: Callable[[], Awaitable[None]]) -> None:
        """Do what is due.

        Parameters
        ----------
        rested : float
            Seconds for which the session has been idle; 0 if it works.
        save : callable
            Takes a snapshot beside the execution.
        """
        state, self._retry = self._state, False
        full = FULL * state.memory.log_bytes
        if not state.saved:
            await self._tend(rested, full, save)
        # A client rings whenever its log is longer than the page says. One that begins to work
        # again shall ring at once, and one whose log is too long by now not at every record.
        budget = self._log_budget if state.log_bytes <= self._log_budget else int(full)
        state.memory.agent.log_budget = 0 if state.saved and state.drained else budget

    async def _tend(self, rested: float, full: float, save: Callable[[], Awaitable[None]]) -> None:
        state, busy = self._state, self._state.busy_seconds
        over = state.log_bytes > self._log_budget
        due = over or rested >= REST_SECONDS or self._cadence.seconds_left(busy) <= 0
        room = self._has_memory(state.dirty_bytes)
        if due and room and (self._cadence.allowed(busy) or rested > 0):
            await self._save(save)
        elif state.log_bytes > full:
            self.obstacle = (
                f"It fills its log faster than {report.size(state.memory.log_bytes)} between two "
                "snapshots that would take 2 % of its time."
                if room
                else "The budget of host memory for logs and snapshots is used up."
            )
            log.warning("The log is freed without a snapshot: %s", self.obstacle)
            await state.forgo()

    async def _save(self, save: Callable[[], Awaitable[None]]) -> None:
        try:
            await save()
        except WorkerError as error:
            log.warning("No snapshot: %s", error)
            self._retry = True
            return
        self.obstacle = ""
        self._cadence.saved(self._state.busy_seconds, self._state.save_cost)

    def set_timer(self, rested: float) -> None:
        """Look again when, as it looks now, something is due."""
        self._cancel_timer()
        left = self._seconds_left(rested)
        if left != _NEVER:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left, 0.01), self._look)

    def _seconds_left(self, rested: float) -> float:
        if self._retry:
            return RETRY_SECONDS
        if self._state.worker is None or (self._state.saved and self._state.drained):
            return _NEVER
        if rested > 0:
            return REST_SECONDS - rested if rested < REST_SECONDS else _NEVER
        return max(self._cadence.seconds_left(self._state.busy_seconds), RETRY_SECONDS)

    def cancel(self) -> None:
        """Look no more: there is no worker."""
        self._cancel_timer()
        if not self._state.closed:
            self._state.memory.agent.log_budget = self._log_budget

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
