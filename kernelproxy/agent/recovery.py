"""What the deaths of a session's workers mean. Pure.

| death                                            | verdict                                     |
|--------------------------------------------------|---------------------------------------------|
| with nothing to execute                          | retry: whoever killed it, it was no record  |
| by a signal from outside, at any record          | retry: the record is not to blame           |
| by itself at a record, the first and second time | retry                                       |
| the third time in a row at the same record       | skip: that call is reported as an error     |
| `FRUITLESS_MAX` times without any progress       | fail: the session ends                      |

SIGKILL is a signal from outside, also from the kernel when host memory runs out.
"""

from __future__ import annotations

import signal
from enum import Enum

SAME_RECORD_MAX = 3
FRUITLESS_MAX = 100
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Verdict(Enum):
    """What to do after a death."""

    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"


class Deaths:
    """The deaths of one session's workers; `skip` lists the records not to be tried again."""

    def __init__(self) -> None:
        self.skip: list[int] = []
        self._record, self._times = -1, 0
        self._farthest, self._fruitless = -1, 0

    @property
    def careful(self) -> bool:
        """Whether the last worker ended by itself at a record, which may not be the one to blame:
        a GPU's kernels fail after records that follow them were begun.
        """
        return self._times > 0

    def note(self, consumed: int, head: int, status: int | None = None) -> Verdict:
        """Judge the death of a worker that had executed the log below `consumed`.

        Parameters
        ----------
        consumed : int
            Position of the record that was being executed, if it is below `head`.
        head : int
            End of the log.
        status : int, optional
            How it ended: its exit status, or the negative number of the signal that ended it.
        """
        if consumed > self._farthest:
            self._farthest, self._fruitless = consumed, 0
        self._fruitless += 1
        if self._fruitless >= FRUITLESS_MAX:
            return Verdict.FAIL
        if consumed >= head or (status is not None and -status in OUTSIDE):
            self._record, self._times = -1, 0
            return Verdict.RETRY
        if consumed != self._record:
            self._record, self._times = consumed, 0
        self._times += 1
        if self._times < SAME_RECORD_MAX:
            return Verdict.RETRY
        self._record, self._times = -1, 0
        if consumed in self.skip:
            return Verdict.FAIL
        self.skip.append(consumed)
        return Verdict.SKIP

    def forget_before(self, position: int) -> None:
        """Forget records that a snapshot holds the results of: none will be executed again."""
        self.skip = [each for each in self.skip if each >= position]
