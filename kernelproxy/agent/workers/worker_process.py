"""The process of a worker: how it is watched and ended, alone or with others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from kernelproxy.agent.workers.oom_kills import OomKills
from kernelproxy.agent.workers.seat import SeatPlace, WorkerSeat
from kernelproxy.agent.workers.watchdog import CHECKS, StoppedTime, Watchdog, WatchedWait, activity
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import End

#: Seconds for a session to end alone in a process that it shares.
STOP_SECONDS = 30.0


class WorkerProcess:
    """A worker as a process, which other workers may share; see `Worker` for the parameters."""

    def __init__(
        self,
        channel: Channel,
        pid: int,
        pidfd: int,
        ended: asyncio.Future[int | None],
        on_change: Callable[[], object],
    ) -> None:
        self.pid = pid
        self._place = SeatPlace(pid, pidfd, ended, self._on_exit)
        #: Set when its session's memory is free.
        self.exited = asyncio.Event()
        #: True once it has its session.
        self.opened = False
        #: True if its process had other sessions before.
        self.joined = False
        #: It can receive no more commands, and its session ends; `exited` follows.
        self.broken = False
        #: It was broken because a command took too long, which is no sign of a bad record.
        self.overdue = False
        #: Why it was broken, if others waited for it: a clause.
        self.hung = ""
        #: Detects out-of-memory kills in its control group since it began.
        self.starvation = OomKills(pid)
        self._channel, self._on_change = channel, on_change
        self._guarding: asyncio.Task[None] | None = None

    @property
    def pidfd(self) -> int | None:
        """Descriptor of the process; None after `close`."""
        return self._place.pidfd if self._place.pidfd >= 0 else None

    @property
    def watchdog(self) -> Watchdog:
        """Time limits of its session."""
        return self._place.watchdog

    @watchdog.setter
    def watchdog(self, watchdog: Watchdog) -> None:
        self._place.watchdog = watchdog

    # ---------------------------------------------------------------- sharing the process

    @property
    def in_seat(self) -> bool:
        """True if its process is one that other sessions may join."""
        return self._place.seat is not None

    @property
    def seat_secret(self) -> str:
        """Secret of the job whose sessions may join its process; "": none may."""
        return self._place.seat.secret if self._place.seat is not None else ""

    @property
    def can_host(self) -> bool:
        """True if `host` can be called."""
        return self.opened and not (self.broken or self._place.leaving or self.exited.is_set())

    def begin_seat(self, seat: WorkerSeat) -> None:
        """Let others share its process from now on."""
        self._place.enter(seat)

    async def fell_with_others(self) -> bool:
        """Return True if it ended as its process did, in which there were other sessions.

        Its connection has ended. See Note [Seats].
        """
        return (self.broken or self.exited.is_set()) and await self._place.fell_with_others()

    @property
    def suspect(self) -> bool:
        """True if its session may be the reason for that."""
        return self._place.suspect

    # ---------------------------------------------------------------- watching it

    @contextlib.contextmanager
    def waiters_present(
        self, wanted: Callable[[], bool] = lambda: True, *, bounded: bool = True
    ) -> Iterator[None]:
        """In this context, end it if it hangs while others wait for it: see Note [Patience].

        Parameters
        ----------
        wanted : callable
            Returns True while others wait.
        bounded : bool
            True if there is also a limit while it works.
        """
        pressing = asyncio.create_task(self._press(wanted, bounded=bounded))
        try:
            yield
        finally:
            pressing.cancel()

    async def _press(self, wanted: Callable[[], bool], *, bounded: bool) -> None:
        watchdog = self.watchdog
        wait: WatchedWait | None = None
        while not self.broken and watchdog.still_seconds != float("inf"):
            await asyncio.sleep(watchdog.still_seconds / CHECKS)
            if not wanted() or self._place.endless():
                wait = None
                continue
            wait = wait or WatchedWait(watchdog, bounded=bounded)
            seen = activity(self.pid)
            self._give_up(wait.check(time.monotonic(), seen) if seen is not None else "")

    def guard(self, needed: Callable[[], bool]) -> None:
        """From now on, end it if a signal has stopped it for long while it is `needed`, even if no
        other session waits: see Note [Patience].
        """
        self._guarding = asyncio.create_task(self._guard(needed))

    async def _guard(self, needed: Callable[[], bool]) -> None:
        watchdog, stop = self.watchdog, StoppedTime(self.watchdog)
        while not self.broken and watchdog.still_seconds != float("inf"):
            await asyncio.sleep(watchdog.still_seconds)
            seen = activity(self.pid) if needed() and not self._place.endless() else None
            self._give_up(stop.check(time.monotonic(), seen))

    def _give_up(self, why: str) -> None:
        """End it, if `why` names a reason."""
        if why and not self.broken:
            self.watchdog.lose()
            self.hung, self.overdue = why, True
            self._break()

    def _end_guard(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()

    # ---------------------------------------------------------------- its end

    async def end(self, seconds: float) -> None:
        """End it, and wait until it is gone; kill it if it has not ended within `seconds`.

        In a process that it shares, only its session is ended, if that is in time.
        """
        self._place.leaving = True
        with contextlib.suppress(OSError):  # then it is ending already
            await self._channel.send(End())
        try:
            async with asyncio.timeout(seconds):
                await self.exited.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kill its process, and wait until it is gone. Its memory is free then."""
        self._break()
        await self.exited.wait()

    async def stop(self) -> None:
        """End it, whatever it does, and wait until it is gone: kill it, unless others need its
        process.
        """
        self._place.leaving = True
        if self._place.shared and not self.exited.is_set():
            await self.end(STOP_SECONDS)
        else:
            await self.kill()

    async def status(self) -> int | None:
        """Wait until its process was reaped; return the exit status.

        None: its zygote reports none, or it has ended in a process that continues.
        """
        return await self._place.status()

    def _disconnected(self) -> None:
        """Note the end of its connection: in a process that others need, it has ended then."""
        if not self._place.shared:
            # Without its connection it is of no use, whether or not the process still lives.
            self._break()
            return
        self.broken = True
        self.exited.set()
        if self._place.leaving:
            self._place.leave()
        self._note_change_of_seat()
        self._on_change()

    def _on_exit(self) -> None:
        self.broken = True
        self.exited.set()
        self._note_change_of_seat()
        self._on_change()

    def _abandon(self) -> None:
        """Use it no more. In a process that others need, the end of its connection ends it."""
        if not self._place.shared:
            self._break()
            return
        self.broken = self._place.leaving = True
        self._channel.end()
        self._note_change_of_seat()

    def _break(self) -> None:
        """Send SIGKILL; its connection ends then, which fails a command that waits for a reply."""
        self.broken = True
        if not self.exited.is_set():
            self._place.kill()
        self._note_change_of_seat()

    def _note_change_of_seat(self) -> None:
        if self._place.seat is not None:
            self._place.seat.note_change()
