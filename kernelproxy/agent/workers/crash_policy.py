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
| with others in its process                            | retry, alone: another may be to blame    |
| its device had no memory to execute a record again    | retry, with pauses: it is not to blame   |
| its device was lost, by a fault of the hardware       | retry: no record is to blame             |
| its device was lost while it was not careful          | retry, carefully up to there             |
| its device was lost at one record, by a program fault | skip: that call is reported as an error  |
| its device was lost at one record, for no known cause | as by itself at a record; never fail     |

SIGKILL is a signal from outside, also if the system sends it because host memory ran out. The
system counts these kills (see `oom_kills`); where it does not, the rows on signals from outside
apply. A process that kills workers at random hits different records: `KILLS_MAX` deaths at one
record, with pauses of more than a minute in all and nothing executed in between, are no accident.

Note [Lost devices]: a GPU executes behind its worker, so an assertion in a kernel is noticed at a
later record, perhaps when all were begun and the worker is idle. The log below that position has
the record that is to blame. The next worker is *careful* there: it waits for each record before it
begins the next. If its device is lost again, by an error that only a program can cause, the record
at which that happens is to blame, and is skipped at once: a fault costs the first worker and two
that were careful up to there. If the careful worker passes that position, nothing is to blame, as
for an error of the GPU's memory, and it continues at full speed.

Nothing else ends a session: as long as its state can be rebuilt, the agent tries to, with growing
pauses after the first few deaths without any progress.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterable
from enum import Enum

from kernelproxy.common.protocol import HARDWARE_FAULTS, PROGRAM_FAULTS, DeviceLost

SAME_RECORD_MAX = 3
KILLS_MAX = 13
#: For so many deaths without progress, the next worker is started at once.
AT_ONCE_MAX = 3
#: Seconds between two attempts: the first pause, from which they double; the longest pause; and the
#: longest one after deaths.
PAUSE_MIN, PAUSE_MAX, PAUSE_OF_DEATHS_MAX = 1.0, 60.0, 10.0
#: Errors of the system for a resource that it lacks now, and may have later.
_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
CRASHED = "the operator ended the device's process each time it ran"
STARVED = "the system ended the device's process each time"

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
        #: Position below which the next worker executes one record at a time, see
        #: Note [Lost devices]; 0: nowhere.
        self.careful_until = 0
        #: Position below which its workers are alone in their processes, see Note [Seats].
        self.alone_until = 0
        #: Seconds to wait before the next worker is started.
        self.pause = 0.0
        self._record, self._times = -1, 0
        self._killed_at, self._kills = -1, 0
        self._farthest, self._fruitless = -1, 0
        self._words: dict[int, str] = {}

    def reasons(self) -> list[str]:
        """Return the text of the error that the notebook gets for each record in `skip`."""
        return [self.reason(record) for record in self.skip]

    def reason(self, record: int) -> str:
        """Return the text of the error that the notebook gets for a record that is skipped."""
        return self._words.get(record, STARVED if record in self.starved else CRASHED)

    def recover(
        self, skip: Iterable[int], starved: Iterable[int], why: Iterable[str], careful_until: int
    ) -> None:
        """Continue from another agent's `skip`, `starved`, `reasons` and `careful_until`."""
        self.skip, self.starved = list(skip), list(starved)
        self._words = dict(zip(self.skip, why, strict=False))  # earlier agents had none
        self.careful_until = careful_until

    def note(
        self,
        consumed: int,
        head: int,
        status: int | None = None,
        *,
        starved: bool = False,
        lost: DeviceLost | None = None,
        without_room: bool = False,
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
        lost : DeviceLost, optional
            Its last message, if its device rejected all further work.
        without_room : bool
            True if its device had no memory to execute a record again.
        """
        alone = consumed < self.careful_until
        if not alone:
            self.careful_until = 0  # it is passed
        if consumed > self._farthest:
            self._farthest, self._fruitless = consumed, 0
        self._fruitless += 1
        vain = self._fruitless if starved or without_room else self._fruitless - AT_ONCE_MAX
        self.pause = pause(vain, PAUSE_OF_DEATHS_MAX) if vain > 0 else 0.0
        if without_room or (lost is not None and lost.code in HARDWARE_FAULTS):
            return Verdict.RETRY
        if lost is not None and not alone:
            self._record, self._times, self._killed_at, self._kills = -1, 0, -1, 0
            self.careful_until = min(consumed + 1, head)
            return Verdict.RETRY
        if lost is not None and lost.code in PROGRAM_FAULTS:
            return self._skip(consumed, words=lost.message, outside=True)
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
                return self._skip(consumed, outside=True)
            return Verdict.RETRY
        self._times += 1
        self.careful_until = max(self.careful_until, consumed + 1)
        if self._times >= SAME_RECORD_MAX:
            words, outside = lost.message if lost else "", starved or lost is not None
            return self._skip(consumed, words=words, starved=starved, outside=outside)
        return Verdict.RETRY

    def fell_with_others(self, consumed: int, *, suspect: bool) -> None:
        """Note the end of a process with several sessions: that counts against no record.

        Parameters
        ----------
        consumed : int
            As in `note`.
        suspect : bool
            True if the session may be the reason.
        """
        if suspect:
            self.alone_until = consumed + 1

    def may_share(self, consumed: int) -> bool:
        """Return True if the next worker may be in a process with others."""
        return consumed >= self.alone_until

    def _skip(
        self, record: int, *, outside: bool, words: str = "", starved: bool = False
    ) -> Verdict:
        """Skip a record. If it is skipped already: retry after an outside cause, otherwise fail."""
        if record in self.skip:  # it is not executed any more
            return Verdict.RETRY if outside else Verdict.FAIL
        self._record, self._times, self._kills, self._fruitless, self.pause = -1, 0, 0, 0, 0.0
        self.skip.append(record)
        if words:
            self._words[record] = words
        if starved:
            self.starved.append(record)
        return Verdict.SKIP

    def forget_before(self, position: int) -> None:
        """Forget records whose results are in a snapshot: none will be executed again."""
        self.skip = [each for each in self.skip if each >= position]
        self.starved = [each for each in self.starved if each >= position]
        self._words = {each: why for each, why in self._words.items() if each >= position}
        if position >= self.careful_until:
            self.careful_until = 0
