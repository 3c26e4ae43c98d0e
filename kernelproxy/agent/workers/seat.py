"""The process of a worker, which several workers may share.

Note [Seats]: the sessions of the ranks of one job that are on one software device are executed by
one process, a *seat*. Each session has its own connection to it, and its own `Worker`, which can be
ended alone. What concerns the process concerns all of them: if it crashes, or must be killed as one
session hangs, each session is rebuilt from its own snapshot and log.

The death of a shared process is not evidence against any of its records (see `crash_policy`). So
after a crash, sessions start again in processes of their own, until they have executed more than
before: if a record is to blame, it kills the process of its own session next. If the agent has
killed the process because of one session, only that one is kept apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable

from kernelproxy.agent.workers.watchdog import Watchdog

REAP_SECONDS = 5.0
#: Seconds between the end of a connection and that of its process, if the process has crashed.
FALL_SECONDS = 1.0


class WorkerSeat:
    """A process that several workers may share; it begins with the first place in it.

    Parameters
    ----------
    secret : str
        Of the job, see `Open`.
    """

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._places: list[SeatPlace] = []
        self._change: asyncio.Future[None] | None = None
        self._ended = False
        #: True if its process ended, or was killed, while it had several sessions.
        self.fell_shared = False
        #: True if the agent has killed it while it had several sessions.
        self.killed = False

    def enter(self, place: SeatPlace) -> None:
        """Add a worker's place."""
        self._places.append(place)

    def leave(self, place: SeatPlace) -> None:
        """Remove a place, as the session of its worker has ended. Idempotent."""
        if place in self._places:
            self._places.remove(place)
            self.note_change()

    @property
    def empty(self) -> bool:
        """True if it has no places: its process has ended, or is killed."""
        return not self._places

    def is_shared_by(self, place: SeatPlace) -> bool:
        """True if others than this one need the process."""
        return any(each is not place and not each.leaving for each in self._places)

    def endless(self) -> bool:
        """True if it must not be killed because one of its sessions hangs; see `Watchdog`."""
        return any(each.watchdog.endless() for each in self._places)

    def note_kill(self) -> None:
        """Note that the agent kills its process while others are in it."""
        self.killed = True
        self.note_end()

    def note_end(self) -> None:
        """Note the end of its process. Idempotent."""
        if not self._ended:
            self._ended, self.fell_shared = True, len(self._places) > 1
            self.note_change()

    def note_change(self) -> None:
        """Wake up `changed`."""
        if self._change is not None:
            self._change.set_result(None)
            self._change = None

    async def changed(self) -> None:
        """Wait until a worker in it has been opened or has ended."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._change})


class SeatPlace:
    """A worker's hold on its process. Owns the pidfd until `close`.

    Parameters
    ----------
    pid, pidfd : int
    ended : asyncio.Future
        Exit status of the process, set when it was reaped; None if that is not known.
    on_exit : callable
        Called when the process has ended.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        ended: asyncio.Future[int | None],
        on_exit: Callable[[], object],
    ) -> None:
        self.pid, self.pidfd, self.ended, self._on_exit = pid, pidfd, ended, on_exit
        #: True if its session is being ended: it does not need the process any more.
        self.leaving = False
        #: Set when the process has ended.
        self.gone = asyncio.Event()
        self.watchdog = Watchdog(float("inf"), float("inf"))
        self.seat: WorkerSeat | None = None
        self._blamed = False
        asyncio.get_running_loop().add_reader(pidfd, self._note_exit)

    def enter(self, seat: WorkerSeat) -> None:
        """Share the process with all others that enter the seat."""
        self.seat = seat
        seat.enter(self)

    @property
    def shared(self) -> bool:
        """True if the process has sessions of others."""
        return self.seat is not None and self.seat.is_shared_by(self)

    @property
    def suspect(self) -> bool:
        """True if its session may be the reason why a shared process ended."""
        return self._blamed or self.seat is None or not self.seat.killed

    def endless(self) -> bool:
        """True if the process must not be killed because a session hangs."""
        return self.watchdog.endless() if self.seat is None else self.seat.endless()

    def kill(self) -> None:
        """Send SIGKILL to the process, because of this session."""
        if self.gone.is_set() or self.pidfd < 0:
            return
        if self.seat is not None and self.shared:
            self._blamed = True
            self.seat.note_kill()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def leave(self) -> None:
        """Note that its session has ended. Idempotent."""
        if self.seat is not None:
            if self.pidfd >= 0 and not self.gone.is_set() and _has_ended(self.pidfd):
                self.seat.note_end()
            self.seat.leave(self)

    async def fell_with_others(self) -> bool:
        """Return True if its process has ended with several sessions, after its connection has."""
        if self.seat is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FALL_SECONDS):
                await self.gone.wait()
        return self.seat.fell_shared

    async def status(self) -> int | None:
        """Wait until the process was reaped; return its exit status.

        None: its zygote reports none, or only the session has ended.
        """
        if self.seat is not None and not self.gone.is_set():
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_SECONDS):
                return await asyncio.shield(self.ended)
        return None

    def close(self) -> None:
        """Leave the process, and kill it unless others need it. Idempotent."""
        if self.pidfd < 0:
            return
        if not self.shared:
            self.kill()
        self.leave()
        asyncio.get_running_loop().remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1

    def _note_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        self.gone.set()
        if self.seat is not None:
            self.seat.note_end()
        self._on_exit()


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
