"""How much of the system daemon's one loop a user may take.

Note [Fairness]: whatever a user's connections make the daemon do on its loop is measured, step
by step, and charged to the user. Who has used up `BURST_SECONDS` is heard again when that has been
paid back, at `RATE` seconds a second: so all connections of one user together keep the loop from
others for a burst, and from then on for a fifth of the time. Only the next message waits, never
what was begun; and one connection at a time, so that a hundred do not wake up too early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

RATE = 0.2
BURST_SECONDS = 0.02
#: Nobody waits longer for one step, whoever is to blame for what it took.
PAUSE_SECONDS_MAX = 1.0


class Share:
    """One user's.

    Parameters
    ----------
    clock : callable
        Returns seconds.
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
        """Seconds until the user may be heard again; 0: now."""
        self._refill()
        return 0.0 if self._left > 0 else min(PAUSE_SECONDS_MAX, -self._left / RATE + 1e-3)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(BURST_SECONDS, self._left + (now - self._at) * RATE)
        self._at = now

    async def turn(self) -> None:
        """Wait until the user may be heard."""
        if not self._queue.locked() and not self.pause():
            return
        async with self._queue:
            while pause := self.pause():
                await asyncio.sleep(pause)

    async def charge(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something, and charge what it takes of the loop."""
        await _Charged(work, self)


class _Charged(Awaitable[None]):
    """Steps a coroutine, and measures each step."""

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
