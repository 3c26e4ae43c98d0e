"""User-facing wait estimates: position, expected wait, and reason; worded the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

from jupyter_sing.scheduler.explain import explain
from kernelproxy.common import readable
from kernelproxy.common.scheduler_api import SessionOutlook

#: Seconds for which an answer is cached if there was no event since.
KEEP_SECONDS = 0.1


class WaitEstimates:
    """Cached outlooks of all waiting sessions at once: callers mostly ask for all of them.

    Parameters
    ----------
    forecast : callable
        `Engine.outlooks`.
    named : callable
        Replaces ids by names in a clause, as far as the user of a session may read them.
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        forecast: Callable[[float], dict[str, explain.ExplainedWait]],
        named: Callable[[str, str], str],
        clock: Callable[[], float],
    ) -> None:
        self._forecast, self._named, self._clock = forecast, named, clock
        self._found: dict[str, explain.ExplainedWait] = {}
        self._at = -math.inf

    def forget(self) -> None:
        """Drop the cache after an event."""
        self._at = -math.inf

    def waiting(self) -> list[str]:
        """Return the sessions that wait."""
        return list(self._all())

    def of(self, session: str) -> SessionOutlook | None:
        """Return the outlook of a session; None: it does not wait."""
        found = self._all().get(session)
        if found is None:
            return None
        seconds = found.expected_wait
        known = None if seconds is None or seconds == math.inf else seconds
        return SessionOutlook(found.position, known, self._sentence(session, found))

    def _all(self) -> dict[str, explain.ExplainedWait]:
        now = self._clock()
        if now - self._at > KEEP_SECONDS:
            self._found, self._at = self._forecast(now), now
        return self._found

    def _sentence(self, session: str, found: explain.ExplainedWait) -> str:
        if found.expected_wait == math.inf:
            return f"Cannot run: {self._named(found.reason, session)}."
        turn = readable.turn(found.position, found.expected_wait)
        if found.where:
            return f"Waiting for {self._named(found.where, session)}. {turn}"
        return f"Waiting for its turn: {self._named(found.reason, session)}. {turn}"
