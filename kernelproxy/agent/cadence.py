"""How often a session is saved in the background: as seldom as its budget of time asks. Pure.

A snapshot keeps the worker from executing while it parks and while it copies what it is about to
overwrite. That is measured, snapshot by snapshot, and the next one may begin when the session has
executed for so long that the share of the last one in it is small enough.
"""

from __future__ import annotations

#: The share of a session's time that background snapshots may take.
SHARE = 0.02
#: Device time, in seconds, that recovery should have to replay at most: no need to save more often.
REPLAY_SECONDS = 2.0


class Cadence:
    """When the next background snapshot may and should begin.

    All times are seconds; `busy` is the time that the session's workers have executed, in all.

    Parameters
    ----------
    share : float
        What the snapshots may cost, as a part of the time between them.
    replay_seconds : float
        Time between two snapshots where they cost next to nothing.
    """

    def __init__(self, share: float = SHARE, replay_seconds: float = REPLAY_SECONDS) -> None:
        self._share, self._replay_seconds = share, replay_seconds
        self._saved_at = 0.0
        self._allowed_at = 0.0  # nothing was measured yet: the first one may begin at once

    def saved(self, busy: float, cost: float) -> None:
        """Note a snapshot that was taken at `busy` and kept the worker waiting for `cost`."""
        self._saved_at = busy
        self._allowed_at = busy + max(cost, 0.0) / self._share

    def allowed(self, busy: float) -> bool:
        """Whether a snapshot now would stay within the share."""
        return busy >= self._allowed_at

    def seconds_left(self, busy: float) -> float:
        """Time to execute until a snapshot is due; 0 or less: now."""
        return max(self._saved_at + self._replay_seconds, self._allowed_at) - busy
