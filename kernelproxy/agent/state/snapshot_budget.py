"""How often a session is saved in the background: as seldom as its budget of time asks. Pure.

A snapshot keeps the worker from executing while it parks and while it copies what it is about to
overwrite. That is measured, snapshot by snapshot, and the next one may begin when so much time has
passed that the share of the last one in it is small enough: time of the clock on the wall, as that
is what a step takes, also one that waits for its data.

Note [Uploads]: who brings a model to the device fills the log within a second and executes next to
nothing, so there is no step whose time a snapshot could take a share of. The bytes in the log are
the new state, and saving them costs another copy of what was copied twice to get there. So it is
allowed, as long as what it copies is of the size of what came, and not counted: it tells nothing of
what snapshots will cost the steps that follow. A large tensor arrives in parts and is copied whole
each time, so one that copies a multiple of what came waits until the log must be freed.
"""

from __future__ import annotations

#: The share of a session's time that background snapshots may take.
SHARE = 0.02
#: Device time, in seconds, that recovery should have to replay at most: no need to save more often.
REPLAY_SECONDS = 2.0
#: Bytes of log for each operator from which on a session takes bytes in rather than computes.
UPLOAD_BYTES = 1 << 20
#: How many times what the log holds the snapshot of an upload may copy, and that if otherwise the
#: log would be lost.
UPLOAD_COPIES, UPLOAD_COPIES_MAX = 2, 8


class Cadence:
    """When the next background snapshot may and should begin.

    All times are seconds; `busy` is the time that the session's workers have executed, in all, and
    `now` that of a clock.

    Parameters
    ----------
    share : float
        What the snapshots may cost, as a part of the time between them.
    replay_seconds : float
        Time of execution between two snapshots where they cost next to nothing.
    """

    def __init__(self, share: float = SHARE, replay_seconds: float = REPLAY_SECONDS) -> None:
        self._share, self._replay_seconds = share, replay_seconds
        self._saved_at = 0.0
        self._allowed_at = float("-inf")  # nothing was measured yet: the first one may begin

    def saved(self, busy: float, now: float, cost: float) -> None:
        """Note a snapshot that was taken by now and kept the worker waiting for `cost`."""
        self._saved_at = busy
        self._allowed_at = now + max(cost, 0.0) / self._share

    def allowed(self, now: float) -> bool:
        """Whether a snapshot now would stay within the share."""
        return now >= self._allowed_at

    def seconds_left(self, busy: float, now: float) -> float:
        """Time until a snapshot is due if the worker executes meanwhile; 0 or less: now."""
        return max(self._saved_at + self._replay_seconds - busy, self._allowed_at - now)


class Inflow:
    """Tells an upload from a computation, by the log (Note [Uploads])."""

    def __init__(self) -> None:
        self.is_upload = False
        self._head = self._operators = 0

    def note(self, head: int, operators: int) -> None:
        """Look at what has come since `saved`; if nothing did, it is what it was.

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
        """A snapshot begins, or the log was given back: what comes now counts."""
        self.note(head, operators)
        self._head, self._operators = head, operators

    def worth_saving(self, log_bytes: int, dirty_bytes: int, *, full: bool) -> bool:
        """Whether a snapshot may be taken whatever its share of time is.

        Parameters
        ----------
        log_bytes : int
            Of the log since the last snapshot.
        dirty_bytes : int
            What a snapshot would copy.
        full : bool
            Whether that log is lost otherwise.
        """
        copies = UPLOAD_COPIES_MAX if full else UPLOAD_COPIES
        return self.is_upload and dirty_bytes <= copies * log_bytes
