"""Idle timer: how long a session has not been used, and when to check that again."""

from __future__ import annotations

import asyncio
import math
import time

from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.protocol import OpenSession
from kernelproxy.common.scheduler_api import Allowance


def waits(
    request: OpenSession, settings: AgentSettings, allowance: Allowance
) -> tuple[float, float]:
    """Return the idle timeouts of a session.

    The request can ask for less than the policy allows. It can ask for more, or for never, only
    where the policy says nothing.

    Returns
    -------
    tuple of float
        Seconds until it is suspended, and until it hibernates; 0 or less: never.
    """
    requested = request.idle_timeout
    suspend = settings.idle_timeout if requested is None else requested
    hibernate = request.hibernate_timeout
    if (allowed := allowance.suspend_after) is not None:
        suspend = min(allowed, requested if requested is not None and requested > 0 else math.inf)
    if (allowed := allowance.hibernate_after) is not None:
        hibernate = min(allowed, hibernate if hibernate > 0 else math.inf)
    return (0.0 if suspend == math.inf else suspend, 0.0 if hibernate == math.inf else hibernate)


class IdleTimer:
    """Requests reconciling when a session may have been idle for its timeout.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    timeouts : tuple of float
        Seconds without use after which it is suspended, and after which it hibernates; 0 or less:
        never. A pinned session is never suspended for idleness.
    """

    def __init__(
        self, core: SessionCore, state: DeviceState, timeouts: tuple[float, float]
    ) -> None:
        self.suspend_after, self.hibernate_after = timeouts
        self._core, self._state = core, state
        self._used = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> float:
        """Time of the last use, in seconds of the monotonic clock."""
        return min(time.monotonic(), max(self._used, self._state.active_ns / 1e9))

    def note_use(self) -> None:
        """Count the present moment as a use."""
        self._used = time.monotonic()

    def idle_for(self) -> float:
        """Return the seconds since its last use; 0 if it has something to do."""
        return max(time.monotonic() - self.active, 1e-9) if self._state.idle else 0.0

    def drained_for(self) -> float:
        """Return the seconds for which there has been nothing to execute; 0 if there is."""
        if not self._state.drained:
            return 0.0
        return time.monotonic() - self._state.memory.worker.active_ns / 1e9

    def seconds_left(self) -> float:
        """Return the seconds until it should be suspended if it is not used meanwhile."""
        if (
            self._state.worker is None
            or self.suspend_after <= 0
            or self._core.inhibited(Inhibitor.PIN)
        ):
            return float("inf")
        if not self._state.idle:
            return self.suspend_after
        return self.active + self.suspend_after - time.monotonic()

    def set_timer(self) -> None:
        """Schedule the next check for when it should be suspended."""
        self.cancel()
        left = self.seconds_left()
        if left != float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left, 0.001), self._core.request_reconcile)

    def cancel(self) -> None:
        """Cancel the scheduled check."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
