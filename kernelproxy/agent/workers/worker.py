"""A worker process, as the agent handles it: commands with a time limit, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kernelproxy.agent.workers.snapshot import Departure, Snapshot
from kernelproxy.agent.workers.worker_process import WorkerProcess
from kernelproxy.common.errors import (
    DeviceFullError,
    InternalError,
    ProtocolError,
    WorkerDiedError,
    WorkerError,
)
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.ipc.fd_validation import fix_snapshot
from kernelproxy.common.protocol import (
    Adopt,
    CacheGivenBack,
    ContentsListed,
    Depart,
    Departed,
    DeviceLost,
    Done,
    Ended,
    Error,
    Frozen,
    Gate,
    GiveBackCache,
    Host,
    Hurry,
    Lease,
    ListContents,
    Message,
    NeedRoom,
    Observe,
    Observed,
    Open,
    Opened,
    Preallocate,
    Quiesced,
    Replay,
    RoomMade,
    SnapshotTaken,
    TakeSnapshot,
    Trim,
    Warm,
)

#: Longest error message, in characters, that is taken from a process that a user controls.
MESSAGE_MAX = 2000
#: Seconds for which a worker that departs may still take memory for that.
PREPARING_SECONDS = 5.0

Reply = TypeVar("Reply", bound=Message)


class Worker(WorkerProcess):
    """A worker. Owns its channel and its pidfd until `close`.

    It may share its process with other workers, see Note [Seats] in `seat`: then it ends with its
    connection.

    Parameters
    ----------
    channel : Channel
        Its control connection.
    pid, pidfd : int
    ended : asyncio.Future
        Its exit status, set when it was reaped; None if that is not known.
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
        super().__init__(channel, pid, pidfd, ended, on_change)
        self.corrupt: str | None = None
        #: What its device said when it rejected all further work.
        self.lost: DeviceLost | None = None
        #: Makes others give back device memory, for which it waits.
        self.make_room: Callable[[], Awaitable[None]] | None = None
        self._ordered = False
        self._limit: asyncio.Timeout | None = None
        self._frozen: Callable[[], object] | None = None
        self._hurrying: asyncio.Task[None] | None = None
        self._preallocates = False
        self._room: asyncio.Task[None] | None = None
        self._parking: tuple[int, asyncio.Future[None]] | None = None
        self._observing: asyncio.Future[Observed] | None = None
        self._emptying: asyncio.Future[int] | None = None
        # Its replies; None after its end. Queued, so that a cancelled command leaks nothing.
        self._replies: asyncio.Queue[tuple[Message, list[int]] | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(), name=f"worker {pid}")

    # ---------------------------------------------------------------- sharing its process

    async def host(self, on_change: Callable[[], object]) -> Worker | None:
        """Return a worker for one more session in its process; None if the process is ending.

        Raises
        ------
        WorkerError
            If descriptors run out.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerError(f"A worker could not be started: {error}.") from error
        with theirs:
            try:
                worker = self._beside(self._channel.another(ours), on_change)
            except OSError as error:
                ours.close()
                raise WorkerError(f"A worker could not be started: {error}.") from error
            try:
                await self._channel.send(Host(), [theirs.fileno()])
            except BaseException as error:
                worker.close()
                if isinstance(error, OSError):
                    self._abandon()
                    return None
                raise
        return worker

    def _beside(self, channel: Channel, on_change: Callable[[], object]) -> Worker:
        place = self._place
        worker = Worker(channel, self.pid, os.dup(place.pidfd), place.ended, on_change)
        if place.seat is not None:
            worker.begin_seat(place.seat)
        worker.joined = True
        return worker

    # ---------------------------------------------------------------- commands

    async def list_contents(self, seconds: float) -> int:
        """Return a file of what its process holds, of which the caller takes ownership.

        Only before `open`, and if it has `joined` a process; raises as `open`.
        """
        _, (fd,) = await self._order(ListContents(), ContentsListed, seconds, fd_count=1)
        self._fix([fd])
        return fd

    async def open(self, order: Open, fds: Sequence[int], seconds: float) -> None:
        """Assign its session to it.

        Raises
        ------
        WorkerError
            If it refuses, or dies, or takes longer than `seconds` (then it is killed).
        """
        await self._order(order, Opened, seconds, fds)
        self.opened = True
        self._note_change_of_seat()

    async def warm(self, device: str, visible: str, title: str, seconds: float) -> None:
        """Make it create a context on a GPU, before it has a session; raises as `open`."""
        await self._order(Warm(device, visible, title), Done, seconds)

    def assign(self, on_change: Callable[[], object]) -> None:
        """Replace the callback: it is for a session from now on."""
        self._on_change = on_change

    async def gate(self, is_open: bool, seconds: float) -> None:
        """Open or close its gate; raises as `open`."""
        await self._order(Gate(is_open), Done, seconds)

    async def set_lease(self, token: int, given: bool, within: float = 0.0) -> None:
        """Give or take its permission to execute; at any time, also during another command.

        Raises
        ------
        OSError
            If it is gone.
        """
        await self._channel.send(Lease(token, given, within))

    async def take_lease(self, token: int, wanted: Callable[[], bool], within: float = 0.0) -> None:
        """Take its lease, and wait until it executes nothing, however long an operator takes.

        It may continue for `within` seconds, to the point where it uses least memory. Also returns
        when it is gone. While `wanted` is true, it is ended if it does not yield in time, see
        Note [Patience].
        """
        parked = asyncio.get_running_loop().create_future()
        self._parking = (token, parked)
        with contextlib.suppress(OSError):
            await self.set_lease(token, given=False, within=within)
            with self.waiters_present(wanted):
                await self._await_report(parked)

    async def observe(self, since: float) -> Observed | None:
        """Return the step that its log repeats; None if it is gone. One caller at a time.

        Parameters
        ----------
        since : float
            Time from which steps are counted, in seconds of the monotonic clock.
        """
        self._observing = asyncio.get_running_loop().create_future()
        with contextlib.suppress(OSError):
            await self._channel.send(Observe(int(since * 1e9)))
            await self._await_report(self._observing)
        return self._observing.result() if self._observing.done() else None

    async def give_back_cache(self, seconds: float) -> int | None:
        """Make it give back the device memory that it keeps for its next tensors, at any time.

        Returns
        -------
        int or None
            Bytes that it could not give back; None: it has not done so within `seconds`.
        """
        if self._emptying is None or self._emptying.done():
            self._emptying = asyncio.get_running_loop().create_future()
            try:
                await self._channel.send(GiveBackCache())
            except OSError:  # it is gone
                return None
        emptying = self._emptying
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._await_report(emptying)
        return emptying.result() if emptying.done() else None

    async def _make_room(self) -> None:
        if self.make_room is not None:
            await self.make_room()
        with contextlib.suppress(OSError):  # it is gone
            await self._channel.send(RoomMade())

    async def _await_report(self, report: asyncio.Future[Any]) -> None:
        """Wait until a message from it has resolved `report`, or it is gone."""
        gone = asyncio.create_task(self.exited.wait())
        try:
            await asyncio.wait({report, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()

    async def snapshot(
        self,
        seconds: float | None,
        *,
        stop: bool,
        patient: bool,
        frozen: Callable[[], object] | None = None,
    ) -> Snapshot:
        """Take a snapshot, of which the caller takes ownership; raises as `open`.

        If `seconds` is None, there is no time limit until `expedite` is called: the snapshot waits
        for the operator that is being executed. See `TakeSnapshot` for `stop` and `patient`;
        `frozen` is called when the content of the snapshot is final.
        """
        order = TakeSnapshot(stop, patient, frozen is not None)
        self._frozen = frozen
        try:
            taken, (fd,) = await self._order(order, SnapshotTaken, seconds, fd_count=1)
        finally:
            self._frozen = None
        self._fix([fd])
        return Snapshot(
            fd, taken.position, taken.bytes, taken.copied, taken.stalled_ns, taken.seconds
        )

    async def depart(self, known: int, seconds: float) -> Departure:
        """Save what it takes along to a process that has the contents in the file `known`.

        Nothing is executed meanwhile. The caller takes ownership. Raises as `open`.
        """
        departed, fds = await self._order(Depart(), Departed, seconds, [known], fd_count=3)
        tables, contents, carried = fds
        try:
            self._fix([tables, contents])
        except WorkerError:
            os.close(carried)
            raise
        return Departure(tables, contents, carried, departed.omitted, departed.copied)

    def _fix(self, fds: Sequence[int]) -> None:
        """Seal files that it has sent, or close them and break; raises WorkerError."""
        try:
            for fd in fds:
                fix_snapshot(fd)
        except WorkerError:
            close_fds(fds)
            self._break()
            raise

    async def trim(self, seconds: float) -> None:
        """Free the memory that no snapshot since `retained` needs; raises as `open`."""
        await self._order(Trim(), Done, seconds)

    async def preallocate(self) -> None:
        """Take the memory that its next snapshot or departure needs, until `expedite`.

        Raises as `open`.
        """
        self._preallocates = True
        try:
            await self._order(Preallocate(), Done, None)
        finally:
            self._preallocates = False

    async def adopt(self, snapshot: Snapshot, seconds: float) -> None:
        """Make a prepared worker load a newer snapshot; raises as `open`."""
        await self._order(Adopt(), Done, seconds, [snapshot.fd])

    async def replay(self, until: int, seconds: float | None) -> None:
        """Open its gate and wait until it has executed the log below `until`; raises as `open`."""
        await self._order(Replay(until), Done, seconds)

    def expedite(self, seconds: float, *, departs: bool = False) -> None:
        """Give a snapshot without a time limit one, `seconds` from now, and all cores.

        `departs`: it needs no snapshot, so a patient one fails instead; but the memory that
        `preallocate` takes, which has some time yet.
        """
        if self._limit is None or self._limit.when() is not None:
            return
        after = PREPARING_SECONDS if departs and self._preallocates else 0.0
        self._limit.reschedule(asyncio.get_running_loop().time() + after + seconds)
        self._hurrying = asyncio.create_task(self._hurry(after, drop=departs))

    async def _hurry(self, after: float, *, drop: bool) -> None:
        await asyncio.sleep(after)
        with contextlib.suppress(OSError):  # then it is ending
            await self._channel.send(Hurry(drop))
        await self._press(lambda: True, bounded=False)

    async def last_words(self) -> str | None:
        """Wait for its end and all its messages; return what it found corrupt, if anything.

        Its end and its last message come through two descriptors, in any order.
        """
        if self.corrupt is not None or not self.exited.is_set():
            await self.stop()
        await asyncio.wait({self._reader})
        return self.corrupt

    def close(self) -> None:
        """Release the process, and kill it if it lives, unless others need it. Idempotent."""
        if self.pidfd is None:
            return
        self.broken = True
        self._place.close()
        self._reader.cancel()
        self._end_guard()
        if self._room is not None:
            self._room.cancel()
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
        """Send a command and wait for its reply."""
        if self._ordered:
            raise InternalError("a worker was given two orders at once")
        if self.broken or self.exited.is_set():
            raise WorkerDiedError("The worker is gone.")
        self._ordered = True
        try:
            async with asyncio.timeout(seconds) as self._limit:
                await self._channel.send(order, fds)
                reply = await self._replies.get()
        except BaseException as error:
            if isinstance(error, TimeoutError):
                self._break()
                self.overdue = True
                raise WorkerError(f"The worker took too long: {order.wire_kind}.") from error
            self._abandon()  # a late reply would be taken for that to the next command
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
            if message.reason == "no-room":
                raise DeviceFullError(message.message[:MESSAGE_MAX])
            raise WorkerError(message.message[:MESSAGE_MAX])
        self._break()
        raise WorkerError(f"The worker answered {order.wire_kind} with something else.")

    async def _read(self) -> None:
        """Receive its messages until the connection ends."""
        try:
            while True:
                self._take(*await self._channel.receive())
        except ConnectionError:
            self._disconnected()
        except (OSError, ProtocolError):
            self._break()
        finally:
            self._replies.put_nowait(None)  # after all its replies: no other one will come

    def _take(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Frozen) and self._frozen is not None and not fds:
            frozen, self._frozen = self._frozen, None
            frozen()
            return
        if isinstance(message, Quiesced) and not fds:
            if self._parking is not None and self._parking[0] == message.token:
                _, parked = self._parking
                if not parked.done():
                    parked.set_result(None)
            return
        if isinstance(message, Observed) and not fds:
            if self._observing is not None and not self._observing.done():
                self._observing.set_result(message)
            return
        if isinstance(message, DeviceLost) and not fds:
            self.lost = self.lost or replace(message, message=message.message[:MESSAGE_MAX])
            self._on_change()
            return
        if isinstance(message, NeedRoom) and not fds:
            self._room = asyncio.create_task(self._make_room())
            return
        if isinstance(message, CacheGivenBack) and not fds:
            if self._emptying is not None and not self._emptying.done():
                self._emptying.set_result(message.kept)
            return
        if self._ordered and self._replies.empty() and not isinstance(message, Ended):
            self._replies.put_nowait((message, fds))
            return
        close_fds(fds)
        if not isinstance(message, Ended):
            raise ProtocolError("A worker answered what it was not asked.")
        self.corrupt = message.message[:MESSAGE_MAX]
        self._on_change()
