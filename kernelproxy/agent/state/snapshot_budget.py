"""Budget of background snapshots: the share of a session's time that they may take. Pure.

A snapshot keeps the worker from executing while it quiesces, and while it copies what it is about
to overwrite. That time is measured for each snapshot. The next one may begin when so much time has
passed that the last one's share of it is small enough. This is wall clock time, because that is
what a step takes, also one that waits for its data.

Note [Uploads]: a program that loads a model onto the device fills the log within a second and
executes next to nothing, so there is no step of whose time a snapshot could take a share. The bytes
in the log are the new state, and a snapshot costs one more copy of what was copied twice to get
there. So a snapshot is allowed as long as it copies about as much as has arrived, and its cost is
not counted: it does not show what snapshots will cost the steps that follow. A large tensor arrives
in parts and is copied whole each time, so a snapshot that copies a multiple of what has arrived
waits until the log must be freed.
"""

from __future__ import annotations

#: The share of a session's time that background snapshots may take.
SHARE = 0.02
#: Device time, in seconds, that recovery should have to replay at most: no need to save more often.
REPLAY_SECONDS = 2.0
#: Bytes of log per operator from which on a session uploads rather than computes.
UPLOAD_BYTES = 1 << 20
#: How many times the bytes of the log a snapshot of an upload may copy: usually, and if the session
#: would not be recoverable otherwise.
UPLOAD_COPIES, UPLOAD_COPIES_MAX = 2, 8


class SnapshotBudget:
    """Schedule of background snapshots: when the next one may, and when it should begin.

    All times are seconds; `busy` is the time that the session's workers have executed, in all, and
    `now` that of a clock.

    Parameters
    ----------
    share : float
        Cost that snapshots may have, as a part of the time between them.
    replay_seconds : float
        Time of execution between two snapshots where they cost next to nothing.
    """

    def __init__(self, share: float = SHARE, replay_seconds: float = REPLAY_SECONDS) -> None:
        self._share, self._replay_seconds = share, replay_seconds
        self._saved_at = 0.0
        self._allowed_at = float("-inf")  # nothing was measured yet: the first one may begin

    def saved(self, busy: float, now: float, cost: float) -> None:
        """Note that a snapshot was taken, which kept the worker from executing for `cost`."""
        self._saved_at = busy
        self._allowed_at = now + max(cost, 0.0) / self._share

    def allowed(self, now: float) -> bool:
        """Return True if a snapshot now would stay within the share."""
        return now >= self._allowed_at

    def seconds_left(self, busy: float, now: float) -> float:
        """Return the time until a snapshot is due if the worker executes; 0 or less: now."""
        return max(self._saved_at + self._replay_seconds - busy, self._allowed_at - now)


class LogInflow:
    """Classifier of uploads and computations, by the log (Note [Uploads])."""

    def __init__(self) -> None:
        self.is_upload = False
        self._head = self._operators = 0

    def note(self, head: int, operators: int) -> None:
        """Classify what has arrived since `saved`; if nothing has, the class stays.

        Parameters
        ----------
        head : int
            End of the log.
        operators : int
            Number of operators in all of the log so far.
        """
        came = head - self._head
        if came > 0:
            self.is_upload = came >= UPLOAD_BYTES * (operators - self._operators)

    def saved(self, head: int, operators: int) -> None:
        """Note that a snapshot begins, or the log was freed: what arrives now counts."""
        self.note(head, operators)
        self._head, self._operators = head, operators

    def worth_saving(self, log_bytes: int, dirty_bytes: int, *, full: bool) -> bool:
        """Return True if a snapshot may be taken whatever its share of time is.

        Parameters
        ----------
        log_bytes : int
            Bytes of the log since the last snapshot.
        dirty_bytes : int
            Bytes that a snapshot would copy.
        full : bool
            True if the log will otherwise be freed without a snapshot.
        """
        copies = UPLOAD_COPIES_MAX if full else UPLOAD_COPIES
        return self.is_upload and dirty_bytes <= copies * log_bytes
