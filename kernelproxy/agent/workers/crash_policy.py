"""What the deaths of a session's workers mean, and when the next one is started. Pure.

| death                                                 | verdict                                  |
|-------------------------------------------------------|------------------------------------------|
| with nothing to execute                               | retry: whoever killed it, it was no call |
| by itself at a record, the first and second time      | retry                                    |
| the third time in a row at the same record            | skip: that call is reported as an error  |
| of want of host memory, by the system's own count     | the same, with pauses between            |
| by another signal from outside, at any record         | retry: the record is not to blame        |
| the `KILLS_MAX`th time in a row at the same record    | skip: something kills it for that call   |
| by itself at a record that is skipped already         | fail: the session ends                   |
| otherwise at one                                      | retry, with pauses: it is not to blame   |

SIGKILL is a signal from outside, also from the system when host memory runs out, which it counts
(see `outofmemory`); where it does not, the last but one row is what is left. Somebody who kills
workers at random hits different records: `KILLS_MAX` deaths at one, with pauses of more than a
minute in all and nothing executed in between, are no accident.

Nothing else ends a session: as long as its state can be rebuilt that is tried, with growing pauses
after the first few deaths without any progress.
"""

from __future__ import annotations

import errno
import signal
from enum import Enum

SAME_RECORD_MAX = 3
KILLS_MAX = 13
#: Deaths without progress after which the next worker is started at once.
AT_ONCE_MAX = 3
#: Seconds between two attempts, which double from the first to the last.
PAUSE_MIN, PAUSE_MAX, PAUSE_OF_DEATHS_MAX = 1.0, 60.0, 10.0
#: What the system says when it has not what is asked for now, and may have it later.
_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


def is_want(error: BaseException) -> bool:
    """Whether what failed may be done later: descriptors or memory are wanting."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    return isinstance(error, MemoryError)


def pause(times: int, longest: float = PAUSE_MAX) -> float:
    """Seconds to wait after so many attempts in vain, from 1."""
    return min(longest, PAUSE_MIN * 2.0 ** min(times - 1, 16))


class Verdict(Enum):
    """What to do after a death."""

    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"


class Deaths:
    """The deaths of one session's workers; `skip` lists the records not to be tried again."""

    def __init__(self) -> None:
        self.skip: list[int] = []
        #: Those of `skip` for which there was not enough host memory.
        self.starved: list[int] = []
        #: Seconds to wait before the next worker is started.
        self.pause = 0.0
        self._record, self._times = -1, 0
        self._killed_at, self._kills = -1, 0
        self._farthest, self._fruitless = -1, 0

    @property
    def careful(self) -> bool:
        """Whether the last worker ended by itself at a record, which may not be the one to blame:
        a GPU's kernels fail after records that follow them were begun.
        """
        return self._times > 0

    def note(
        self, consumed: int, head: int, status: int | None = None, *, starved: bool = False
    ) -> Verdict:
        """Judge the death of a worker that had executed the log below `consumed`.

        Parameters
        ----------
        consumed : int
            Position of the record that was being executed, if it is below `head`.
        head : int
            End of the log.
        status : int, optional
            How it ended: its exit status, or the negative number of the signal that ended it.
        starved : bool
            Whether the system ended it for want of host memory.
        """
        if consumed > self._farthest:
            self._farthest, self._fruitless = consumed, 0
        self._fruitless += 1
        vain = self._fruitless if starved else self._fruitless - AT_ONCE_MAX
        self.pause = pause(vain, PAUSE_OF_DEATHS_MAX) if vain > 0 else 0.0
        outside = status is not None and -status in OUTSIDE and not starved
        if consumed >= head or outside:
            self._record, self._times = -1, 0
        elif consumed != self._record:
            self._record, self._times = consumed, 0
        if consumed >= head or not outside or consumed != self._killed_at:
            self._killed_at, self._kills = consumed, 0
        if consumed >= head:
            return Verdict.RETRY
        if outside:
            self._kills += 1
            if self._kills >= KILLS_MAX:
                return self._skip(consumed, starved=False, outside=True)
            return Verdict.RETRY
        self._times += 1
        if self._times >= SAME_RECORD_MAX:
            return self._skip(consumed, starved=starved, outside=starved)
        return Verdict.RETRY

    def _skip(self, record: int, *, starved: bool, outside: bool) -> Verdict:
        """Blame a record, unless something outside keeps the state from being rebuilt at all."""
        if record in self.skip:  # it is not executed any more
            return Verdict.RETRY if outside else Verdict.FAIL
        self._record, self._times, self._kills, self._fruitless, self.pause = -1, 0, 0, 0, 0.0
        self.skip.append(record)
        if starved:
            self.starved.append(record)
        return Verdict.SKIP

    def forget_before(self, position: int) -> None:
        """Forget records that a snapshot holds the results of: none will be executed again."""
        self.skip = [each for each in self.skip if each >= position]
        self.starved = [each for each in self.starved if each >= position]
