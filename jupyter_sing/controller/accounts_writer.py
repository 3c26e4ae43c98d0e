"""Periodic saving of the engine's accounts, for the next controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jupyter_sing.controller.decision_log import DecisionLog, SavedAccounts

#: Seconds between two writes.
KEEP_SECONDS = 2.0
#: More tokens than are given between two writes: no token is given twice.
TOKENS_MAX = 1_000_000


@dataclass(frozen=True)
class AccountsUpdate:
    """Content of one write.

    Parameters
    ----------
    sessions : list of str
        Ids of all open sessions.
    accounts : dict
        See `Engine.accounts`.
    is_changing : bool
        True if the accounts change even without an event: a session holds a device.
    """

    sessions: list[str]
    accounts: dict[str, Any]
    is_changing: bool


class AccountsWriter:
    """Writes accounts while they change, but at most every two seconds.

    Parameters
    ----------
    journal : DecisionLog
    take : callable
        Returns the content to write, at a time of the clock.
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        journal: DecisionLog,
        take: Callable[[float], AccountsUpdate],
        clock: Callable[[], float],
    ) -> None:
        self._journal, self._take, self._clock = journal, take, clock
        self._timer: asyncio.TimerHandle | None = None
        self._last = float("-inf")

    def note_change(self) -> None:
        """Record an event: schedule a write of the accounts, unless one is scheduled."""
        if self._timer is None:
            left = self._last + KEEP_SECONDS - self._clock()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, left), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._keep():
            self.note_change()

    def _keep(self) -> bool:
        self._last = self._clock()
        taken = self._take(self._last)
        accounts = {**taken.accounts, "token": taken.accounts["token"] + TOKENS_MAX}
        self._journal.keep(SavedAccounts(time.time(), taken.sessions, accounts))
        return taken.is_changing

    def close(self) -> None:
        """Write the accounts for the last time."""
        if self._timer is not None:
            self._timer.cancel()
        self._keep()
