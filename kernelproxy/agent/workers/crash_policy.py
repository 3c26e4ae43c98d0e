"""Policy for deaths of a session's workers: their meaning, and the start of the next one. Pure.

| death                                                 | verdict                                  |
|-------------------------------------------------------|------------------------------------------|
| with nothing to execute                               | retry: no record can be to blame         |
| by itself at a record, the first and second time      | retry                                    |
| the third time in a row at the same record            | skip: that call is reported as an error  |
| for lack of host memory, by the system's own count    | the same, with pauses between            |
| by another signal from outside, at any record         | retry: the record is not to blame        |
| the `KILLS_MAX`th time in a row at the same record    | skip: something kills it for that call   |
| by itself at a record that is skipped already         | fail: the session ends                   |
| otherwise at a record that is skipped already         | retry, with pauses: it is not to blame   |

SIGKILL is a signal from outside, also if the system sends it because host memory ran out. The
system counts these kills (see `oom_kills`); where it does not, the rows on signals from outside
apply. A process that kills workers at random hits different records: `KILLS_MAX` deaths at one
record, with pauses of more than a minute in all and nothing executed in between, are no accident.

Nothing else ends a session: as long as its state can be rebuilt, the agent tries to, with growing
pauses after the first few deaths without any progress.
"""

from __future__ import annotations

import errno
import signal
from enum import Enum

SAME_RECORD_MAX = 3
KILLS_MAX = 13
#: For so many deaths without progress, the next worker is started at once.
AT_ONCE_MAX = 3
#: Seconds between two attempts: the first pause, from which they double; the longest pause; and the
#: longest one after deaths.
PAUSE_MIN, PAUSE_MAX, PAUSE_OF_DEATHS_MAX = 1.0, 60.0, 10.0
#: Errors of the system for a resource that it lacks now, and may have later.
_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


def is_want(error: BaseException) -> bool:
    """Return True if an operation can be retried later: descriptors or memory were short."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    return isinstance(error, MemoryError)


def pause(times: int, longest: float = PAUSE_MAX) -> float:
    """Return the seconds to wait after so many failed attempts, from 1."""
    return min(longest, PAUSE_MIN * 2.0 ** min(times - 1, 16))


class Verdict(Enum):
    """Action after a death."""

    RETRY = "retry"
    SKIP = "skip"
    FAIL = "fail"


class CrashPolicy:
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
        """True if the last worker ended by itself at a record, which may not be the one to blame:
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
            True if the system ended it for lack of host memory.
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
        """Skip a record. If it is skipped already: retry after an outside cause, otherwise fail."""
        if record in self.skip:  # it is not executed any more
            return Verdict.RETRY if outside else Verdict.FAIL
        self._record, self._times, self._kills, self._fruitless, self.pause = -1, 0, 0, 0, 0.0
        self.skip.append(record)
        if starved:
            self.starved.append(record)
        return Verdict.SKIP

    def forget_before(self, position: int) -> None:
        """Forget records whose results are in a snapshot: none will be executed again."""
        self.skip = [each for each in self.skip if each >= position]
        self.starved = [each for each in self.starved if each >= position]
