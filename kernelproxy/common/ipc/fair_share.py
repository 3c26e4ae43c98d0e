"""Rate limit of the time that each user takes on the system daemon's only event loop.

Note [Fairness]: all work that a user's connections cause on the loop is measured, step by step, and
charged to the user, as in a token bucket. When a user's `BURST_SECONDS` are used up, the next
message waits until the debt is refilled, at `RATE` seconds per second. So all connections of one
user together can block the loop for one burst, and after that for a fifth of the time. Only the
next message waits, never work that has begun. One connection waits at a time, so that a hundred do
not wake up too early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

RATE = 0.2
BURST_SECONDS = 0.02
#: Maximum wait after one step, because a step may be long without the user's fault.
PAUSE_SECONDS_MAX = 1.0


class Share:
    """Share of one user.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()
        self._left = BURST_SECONDS
        self._queue = asyncio.Lock()

    def spend(self, seconds: float) -> None:
        """Charge time of the loop."""
        self._refill()
        self._left -= seconds

    def pause(self) -> float:
        """Return the seconds until the user's next message may be processed; 0: now."""
        self._refill()
        return 0.0 if self._left > 0 else min(PAUSE_SECONDS_MAX, -self._left / RATE + 1e-3)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(BURST_SECONDS, self._left + (now - self._at) * RATE)
        self._at = now

    async def turn(self) -> None:
        """Wait until the user's next message may be processed."""
        if not self._queue.locked() and not self.pause():
            return
        async with self._queue:
            while pause := self.pause():
                await asyncio.sleep(pause)

    async def charge(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, and charge its time on the loop."""
        await _Charged(work, self)


class _Charged(Awaitable[None]):
    """Awaitable that runs a coroutine and charges the time of each step."""

    def __init__(self, work: Coroutine[Any, Any, None], share: Share) -> None:
        self._work, self._share = work, share

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = self._work.send
        value: Any = None
        try:
            while True:
                began = time.perf_counter()
                try:
                    waits_for = step(value)
                except StopIteration:
                    return
                finally:
                    self._share.spend(time.perf_counter() - began)
                try:
                    step, value = self._work.send, (yield waits_for)
                except BaseException as error:
                    step, value = self._work.throw, error
        finally:
            self._work.close()
