"""A worker process, as the agent handles it: orders with a time limit, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kernelproxy.agent.workers.oom_kills import Starvation
from kernelproxy.agent.workers.watchdog import LOOKS, Patience, Stopped, Wait, activity
from kernelproxy.common.errors import InternalError, ProtocolError, WorkerDiedError, WorkerError
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.ipc.fd_validation import fix_snapshot
from kernelproxy.common.protocol import (
    Adopt,
    Done,
    End,
    Ended,
    Error,
    Frozen,
    Gate,
    Hurry,
    Lease,
    Message,
    Observe,
    Observed,
    Open,
    Opened,
    Parked,
    Replay,
    SnapshotTaken,
    TakeSnapshot,
    Trim,
)

REAP_SECONDS = 5.0
#: Characters of a sentence of a process that is its user's.
SAID_MAX = 2000

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True)
class Snapshot:
    """All device state at one position of the log.

    Parameters
    ----------
    fd : int
        Memfd with its tables (see `kernelproxy.common.protocol.snapshot_tables`), which is owned.
        The bytes of storages lie in the session's arena.
    position : int
    bytes : int
        What it stands for.
    copied : int
        Bytes of these that had changed since the snapshot before.
    stalled_ns : int
        Nanoseconds for which taking it kept the log from being executed.
    seconds : float
        What taking it took.
    taken : float
        When it was complete, in seconds of the monotonic clock.
    """

    fd: int
    position: int
    bytes: int
    copied: int = 0
    stalled_ns: int = 0
    seconds: float = 0.0
    taken: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Free its tables."""
        os.close(self.fd)


class Worker:
    """A worker. Owns its channel and its pidfd until `close`.

    Parameters
    ----------
    channel : Channel
        Its control connection.
    pid, pidfd : int
    ended : asyncio.Future
        Its exit status, known when it was reaped; None if nobody can tell.
    on_change : callable
        Called when it exits, and when it reports a corrupt log.
    """

    def __init__(
        self,
        channel: Channel,
        pid: int,
        pidfd: int,
        ended: asyncio.Future[int | None],
        on_change: Callable[[], object],
    ) -> None:
        self.pid = pid
        self._ended = ended
        self.exited = asyncio.Event()
        self.corrupt: str | None = None
        #: It cannot be ordered any more and was sent SIGKILL; `exited` follows.
        self.broken = False
        #: It was broken because an order took too long, which is no sign of a bad record.
        self.overdue = False
        #: Why it was broken, if others waited for it: a clause.
        self.hung = ""
        self.patience = Patience(float("inf"), float("inf"))
        #: Whether processes beside it were ended for want of host memory since it began.
        self.starvation = Starvation(pid)
        self._channel, self._pidfd, self._on_change = channel, pidfd, on_change
        self._ordered = False
        self._limit: asyncio.Timeout | None = None
        self._frozen: Callable[[], object] | None = None
        self._hurrying: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._parking: tuple[int, asyncio.Future[None]] | None = None
        self._observing: asyncio.Future[Observed] | None = None
        # What it answered; None after its end. Queued, so that a cancelled order leaks nothing.
        self._replies: asyncio.Queue[tuple[Message, list[int]] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._on_exit)
        self._reader = loop.create_task(self._read(), name=f"worker {pid}")

    @property
    def pidfd(self) -> int | None:
        """Descriptor of the process; None after `close`."""
        return self._pidfd if self._pidfd >= 0 else None

    async def open(self, order: Open, fds: Sequence[int], seconds: float) -> None:
        """Give it its session.

        Raises
        ------
        WorkerError
            If it refuses, or dies, or takes longer than `seconds` (then it is killed).
        """
        await self._order(order, Opened, seconds, fds)

    async def gate(self, is_open: bool, seconds: float) -> None:
        """Open or close its gate; raises as `open`."""
        await self._order(Gate(is_open), Done, seconds)

    async def set_lease(self, token: int, given: bool, within: float = 0.0) -> None:
        """Permit it to execute, or no more; at any time, also while an order is carried out.

        Raises
        ------
        OSError
            If it is gone.
        """
        await self._channel.send(Lease(token, given, within))

    async def take_lease(self, token: int, wanted: Callable[[], bool], within: float = 0.0) -> None:
        """Permit it no more, and wait until it executes nothing, however long an operator takes.

        It may go on for `within` seconds, to where its memory is least. Returns when it is gone,
        too. While it is `wanted` that it gives way it is ended if it does not, see Note [Patience].
        """
        parked = asyncio.get_running_loop().create_future()
        self._parking = (token, parked)
        with contextlib.suppress(OSError):
            await self.set_lease(token, given=False, within=within)
            with self.pressed(wanted):
                await self._heard(parked)

    async def observe(self, since: float) -> Observed | None:
        """Ask which step its log repeats; None if it is gone. One caller at a time.

        Parameters
        ----------
        since : float
            From when on steps are counted, in seconds of the monotonic clock.
        """
        self._observing = asyncio.get_running_loop().create_future()
        with contextlib.suppress(OSError):
            await self._channel.send(Observe(int(since * 1e9)))
            await self._heard(self._observing)
        return self._observing.result() if self._observing.done() else None

    async def _heard(self, told: asyncio.Future[Any]) -> None:
        """Wait until it has said something, or is gone."""
        gone = asyncio.create_task(self.exited.wait())
        try:
            await asyncio.wait({told, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()

    @contextlib.contextmanager
    def pressed(
        self, wanted: Callable[[], bool] = lambda: True, *, bounded: bool = True
    ) -> Iterator[None]:
        """Meanwhile, end it if it hangs while something is wanted of it: see Note [Patience].

        Parameters
        ----------
        wanted : callable
            Whether anybody waits.
        bounded : bool
            Whether it may take so long at most if it works, too.
        """
        pressing = asyncio.create_task(self._press(wanted, bounded=bounded))
        try:
            yield
        finally:
            pressing.cancel()

    async def _press(self, wanted: Callable[[], bool], *, bounded: bool) -> None:
        patience = self.patience
        wait: Wait | None = None
        while not self.broken and patience.still_seconds != float("inf"):
            await asyncio.sleep(patience.still_seconds / LOOKS)
            if not wanted() or patience.endless():
                wait = None
                continue
            wait = wait or Wait(patience, bounded=bounded)
            seen = activity(self.pid)
            self._give_up(wait.look(time.monotonic(), seen) if seen is not None else "")

    def guard(self, needed: Callable[[], bool]) -> None:
        """End it from now on if a signal has stopped it for long while it is `needed`, though
        nobody else waits: see Note [Patience].
        """
        self._guarding = asyncio.create_task(self._guard(needed))

    async def _guard(self, needed: Callable[[], bool]) -> None:
        patience, stop = self.patience, Stopped(self.patience)
        while not self.broken and patience.still_seconds != float("inf"):
            await asyncio.sleep(patience.still_seconds)
            seen = activity(self.pid) if needed() and not patience.endless() else None
            self._give_up(stop.look(time.monotonic(), seen))

    def _give_up(self, why: str) -> None:
        """End it, if there is a reason."""
        if why and not self.broken:
            self.patience.lose()
            self.hung, self.overdue = why, True
            self._break()

    async def snapshot(
        self,
        seconds: float | None,
        *,
        stop: bool,
        patient: bool,
        frozen: Callable[[], object] | None = None,
    ) -> Snapshot:
        """Take a snapshot, whose descriptor becomes the caller's; raises as `open`.

        With None for `seconds` it may take as long as the operator that is being executed, until
        somebody calls `hurry`. See `TakeSnapshot` for `stop` and `patient`; `frozen` is called
        when what it will hold does not change any more.
        """
        order = TakeSnapshot(stop, patient, frozen is not None)
        self._frozen = frozen
        try:
            taken, (fd,) = await self._order(order, SnapshotTaken, seconds, fd_count=1)
        finally:
            self._frozen = None
        try:
            fix_snapshot(fd)
        except WorkerError:
            os.close(fd)
            self._break()
            raise
        return Snapshot(
            fd, taken.position, taken.bytes, taken.copied, taken.stalled_ns, taken.seconds
        )

    async def trim(self, seconds: float) -> None:
        """Give back what no snapshot since `retained` needs; raises as `open`."""
        await self._order(Trim(), Done, seconds)

    async def adopt(self, snapshot: Snapshot, seconds: float) -> None:
        """Let a prepared worker take over a newer snapshot; raises as `open`."""
        await self._order(Adopt(), Done, seconds, [snapshot.fd])

    async def replay(self, until: int, seconds: float | None) -> None:
        """Open its gate and wait until it has executed the log below `until`; raises as `open`."""
        await self._order(Replay(until), Done, seconds)

    def hurry(self, seconds: float) -> None:
        """Give a snapshot without a time limit one, `seconds` from now, and all the cores."""
        if self._limit is None or self._limit.when() is not None:
            return
        self._limit.reschedule(asyncio.get_running_loop().time() + seconds)
        self._hurrying = asyncio.create_task(self._hurry())

    async def _hurry(self) -> None:
        with contextlib.suppress(OSError):  # then it is ending
            await self._channel.send(Hurry())
        await self._press(lambda: True, bounded=False)

    async def end(self, seconds: float) -> None:
        """End it, by force if it does not within `seconds`, and wait until it is gone."""
        with contextlib.suppress(OSError):  # then it is ending already
            await self._channel.send(End())
        try:
            async with asyncio.timeout(seconds):
                await self.exited.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it at once and wait until it is gone. Its memory is free then."""
        self._break()
        await self.exited.wait()

    async def last_words(self) -> str | None:
        """Wait until it is gone and all it said was heard; return what was corrupt, if that.

        Its end and its last message come by two ways, in any order.
        """
        if self.corrupt is not None:
            self._break()
        await self.exited.wait()
        await asyncio.wait({self._reader})
        return self.corrupt

    async def status(self) -> int | None:
        """Wait until it was reaped; None if its zygote does not say how it ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_SECONDS):
                return await asyncio.shield(self._ended)
        return None

    def close(self) -> None:
        """Give up the process, killing it if it lives; doing it twice is no error."""
        if self._pidfd < 0:
            return
        self._break()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._reader.cancel()
        if self._guarding is not None:
            self._guarding.cancel()
        self._channel.close()
        while not self._replies.empty():
            reply = self._replies.get_nowait()
            close_fds(reply[1] if reply else [])

    async def _order(
        self,
        order: Message,
        reply_type: type[Reply],
        seconds: float | None,
        fds: Sequence[int] = (),
        fd_count: int = 0,
    ) -> tuple[Reply, list[int]]:
        """Give an order and wait for its reply."""
        if self._ordered:
            raise InternalError("a worker was given two orders at once")
        if self.broken or self.exited.is_set():
            raise WorkerError("The worker is gone.")
        self._ordered = True
        try:
            async with asyncio.timeout(seconds) as self._limit:
                await self._channel.send(order, fds)
                reply = await self._replies.get()
        except BaseException as error:
            self._break()  # a late answer would be taken for the next order's
            if isinstance(error, TimeoutError):
                self.overdue = True
                raise WorkerError(f"The worker took too long: {type(order).__name__}.") from error
            if isinstance(error, OSError):
                raise WorkerDiedError("The connection to the worker broke.") from error
            raise
        finally:
            self._ordered, self._limit = False, None
            if self._hurrying is not None:
                self._hurrying.cancel()
                self._hurrying = None
        if reply is None:
            raise WorkerDiedError("The worker died.")
        message, received = reply
        if isinstance(message, reply_type) and len(received) == fd_count:
            return message, received
        close_fds(received)
        if isinstance(message, Error):
            raise WorkerError(message.message[:SAID_MAX])
        self._break()
        raise WorkerError(f"The worker answered {type(order).__name__} with something else.")

    async def _read(self) -> None:
        """Take what it says until the connection ends."""
        try:
            while True:
                self._take(*await self._channel.receive())
        except (OSError, ProtocolError):
            # Without its connection it is of no use, whether or not the process still lives.
            self._break()
        finally:
            self._replies.put_nowait(None)  # after all it said: whoever waits waits in vain

    def _take(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Frozen) and self._frozen is not None and not fds:
            frozen, self._frozen = self._frozen, None
            frozen()
            return
        if isinstance(message, Parked) and not fds:
            if self._parking is not None and self._parking[0] == message.token:
                _, parked = self._parking
                if not parked.done():
                    parked.set_result(None)
            return
        if isinstance(message, Observed) and not fds:
            if self._observing is not None and not self._observing.done():
                self._observing.set_result(message)
            return
        if self._ordered and self._replies.empty() and not isinstance(message, Ended):
            self._replies.put_nowait((message, fds))
            return
        close_fds(fds)
        if not isinstance(message, Ended):
            raise ProtocolError("A worker answered what it was not asked.")
        self.corrupt = message.message[:SAID_MAX]
        self._on_change()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.exited.set()
        self._break()
        self._on_change()

    def _break(self) -> None:
        """Send SIGKILL; the end of its connection follows, and ends what waits for an answer."""
        self.broken = True
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
