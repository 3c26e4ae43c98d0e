"""The kernel of a session, as the agent knows it: a process and its connection.

Note [Leaving a session]: before a kernel's process is saved it *detaches*, because a process with
our descriptors cannot be saved: it gives up the session's memory and its connection, and waits for
a line on its *wake* pipe. Then it reattaches; it may be another process by then.

Note [Counting cells]: a kernel that is connected without a device reports how many cells have
ended, always the total. One that has attached counts the cells that have ended since then in its
client page. Both counts move with the process: when it reattaches, also to another session, the
count continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from typing import Any, Protocol

from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.process_watch import ProcessWatch
from kernelproxy.agent.workers.zygotes import Zygotes
from kernelproxy.common.errors import ControlError, ProtocolError, WorkerError
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import (
    Attached,
    Bell,
    CellAsked,
    CellsEnded,
    Done,
    Error,
    Leave,
    Left,
    Message,
)
from kernelproxy.common.shared_memory import close_all

log = logging.getLogger(__name__)

#: Time limit for the process manager to wake a kernel whose process it has saved.
WAKE_SECONDS = 10.0
_VERSION_MAX = 100
KERNEL_ENDED = "Its kernel ended."
#: A descriptor number, and the device and inode of the pipe.
_Pipe = tuple[int, int, int]


class KernelListener(Protocol):
    """Receiver of the events of a kernel."""

    def kernel_joined(self) -> None:
        """It is connected."""

    def kernel_ended(self) -> None:
        """Its process has ended, as it may while it is being saved."""

    def cells_ended(self) -> None:
        """Cells have ended, or one may have: it is connected."""

    def cell_asked(self) -> None:
        """Its user runs another cell while one runs."""


class KernelConnection:
    """Closes the session when its kernel ends, and reconciles it when the kernel rings.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    idle : IdleTimer
    zygotes : Zygotes
    listener : KernelListener
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        idle: IdleTimer,
        zygotes: Zygotes,
        listener: KernelListener,
    ) -> None:
        self.pid: int | None = None
        self.torch_version: str | None = None
        #: True if its process may end without closing the session: it is being saved.
        self.may_end = False
        #: True if it did.
        self.ended = False
        #: How often it has detached.
        self.absences = 0
        #: True if another process may attach in its place.
        self.awaits_another = False
        #: True if another one has taken its place: then its end is expected.
        self.end_is_wanted = False
        #: Ids of the sessions from whose checkpoints its process was restored: processes that it
        #: had started before still name them as their parents'.
        self.continues: tuple[str, ...] = ()
        #: Cells that had ended before it attached.
        self.cells_before = 0
        self._core, self._state, self._idle = core, state, idle
        self._zygotes, self._listener = zygotes, listener
        self._attached = False
        self._channel: Channel | None = None
        self._joined = asyncio.Event()
        self._detaching: asyncio.Future[int] | None = None
        self._wake: _Pipe | None = None  # of a detached kernel that was not woken from here
        self._watch: ProcessWatch | None = None

    # ---------------------------------------------------------------- its process

    def watch_opener(self, pid: int) -> None:
        """Close the session if the process that opened it ends before a kernel has attached."""
        self._watch_process(pid)

    def _watch_process(self, pid: int, pidfd: int | None = None) -> None:
        self.unwatch()
        self._watch = ProcessWatch(pid, self._on_end, pidfd)

    def _on_end(self) -> None:
        if self.may_end:
            self.ended = True
            self._listener.kernel_ended()
        elif self.pid is None:
            self._core.close("Its kernel never started.")
        else:
            self._core.close(KERNEL_ENDED, died=True)

    def unwatch(self) -> None:
        """Stop watching the process. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def hang_up(self) -> None:
        """End the connection of a session that has ended: the process may wait for its peers."""
        if self._channel is not None:
            self._channel.close()

    def take(self, pid: int) -> None:
        """Make a process the session's kernel, and watch it."""
        if pid != self.pid or self.ended or self.may_end:
            self.may_end = self.ended = False
            self.pid = pid
            self._watch_process(pid)  # its socket may live on in children that it forked
        self.awaits_another = False

    def note_saved(self) -> None:
        """Note that the session continues without a process."""
        self.unwatch()
        self.may_end = self.ended = False
        self.pid = self._wake = None

    # ---------------------------------------------------------------- joining

    @property
    def joined(self) -> bool:
        """True if it is connected."""
        return self._joined.is_set()

    async def wait_joined(self, seconds: float) -> None:
        """Wait until it is connected.

        Raises
        ------
        ControlError
            If it does not connect in time.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._joined.wait()
        except TimeoutError:
            raise ControlError("Its kernel does not join its session again.", "timeout") from None

    async def serve(self, channel: Channel, torch_version: str) -> None:
        """Attach a kernel and serve its bells until it disconnects; then close the session.

        A kernel whose agent died attaches again, and so does one that was detached.

        Raises
        ------
        ControlError
            If the session has another kernel already, or no worker could run for this one.
        """
        pid, _ = channel.peer()
        self._check_may_join(pid, self._attached)
        self._attached = True
        try:
            await self._attach(pid, torch_version)
            self._join(channel)
            fds = self._state.memory.kernel_fds()
            try:
                await channel.send(Attached(self._core.id), fds)
            finally:
                close_all(fds)
            self._core.request_reconcile()
            why = await self._receive(channel)
        finally:
            self._attached = False
        if why:
            self._core.close(why, died=why == KERNEL_ENDED)

    async def listen(self, channel: Channel) -> None:
        """Serve a kernel that has no device yet, until it attaches or disconnects: as `serve`.

        Raises
        ------
        ControlError
            If the session has another kernel already.
        """
        pid, _ = channel.peer()
        self._check_may_join(pid, self._attached)
        if pid != self.pid:
            self.take(pid)
            self._core.persist()
        self._join(channel)
        await channel.send(Done())
        self._listener.cells_ended()
        why = await self._receive(channel)
        if why and self._channel is channel:  # it has not attached
            self._core.close(why, died=why == KERNEL_ENDED)

    def _check_may_join(self, pid: int, taken: bool) -> None:
        known = self.pid in (None, pid) or self.awaits_another
        if taken or self._core.closing or not known:
            raise ControlError(
                f"Session {self._core.id} belongs to another process already.",
                "already-attached",
            )

    async def _attach(self, pid: int, torch_version: str) -> None:
        """Make a process the kernel and check its version of torch; raises as `serve`."""
        core = self._core
        if len(torch_version) > _VERSION_MAX:
            raise ControlError("That is no version of torch.", "bad-request")
        if self.torch_version is None:
            try:
                # Better to report it now, while the kernel can still run without us, than at its
                # first cell.
                await self._zygotes.get(core.python, torch_version)
            except WorkerError as error:
                raise ControlError(str(error), "unavailable") from error
            if core.closing:
                raise ControlError(f"Session {core.id} was closed.", "ended")
            self.torch_version = torch_version
        if pid != self.pid or self.may_end:
            self.take(pid)
        self._core.persist()

    def _join(self, channel: Channel) -> None:
        self._channel, self._wake = channel, None
        self.may_end = self.awaits_another = False
        self._joined.set()
        self._listener.kernel_joined()
        self._core.request_reconcile()

    async def _receive(self, channel: Channel) -> str:
        """Receive until the connection ends; return the reason, or "" if the kernel detached."""
        try:
            while True:
                message = expect(await channel.receive())
                if isinstance(message, Bell):
                    self._core.request_reconcile()
                elif isinstance(message, CellAsked):
                    self._listener.cell_asked()
                elif isinstance(message, CellsEnded):
                    self._count_cells(message.count)
                elif isinstance(message, Left) and not self._core.shared:
                    self._detached(message.wake_fd)
                    return ""
                elif isinstance(message, Error):
                    self._stayed(ControlError(message.message, message.reason))
                else:
                    return "Its kernel sent something else than bells and counts."
        except ConnectionError:
            return KERNEL_ENDED
        except (OSError, ProtocolError) as error:
            return f"Its kernel's connection broke: {error}"
        finally:
            self._stayed(ControlError("Its process has disconnected: try again.", "busy"))

    def _count_cells(self, count: int) -> None:
        if count > self.cells_before:  # else it has only reconnected
            self._idle.note_use()
        self.cells_before = count
        if self._attached:  # it does not report this again
            self._core.persist()
        self._listener.cells_ended()

    # ---------------------------------------------------------------- detaching

    async def detach(self, seconds: float) -> int:
        """Make it give up memory and connection; return the number of its wake pipe.

        Raises
        ------
        ControlError
            If it does not: then it is still connected, or reattaches by itself.
        """
        self._detaching = asyncio.get_running_loop().create_future()
        try:
            await self.send(Leave())
            async with asyncio.timeout(seconds):
                return await self._detaching
        except TimeoutError:
            raise ControlError("The kernel does not let go of its device.", "timeout") from None
        finally:
            self._detaching = None

    def _detached(self, wake_fd: int) -> None:
        self._channel = None
        self._joined.clear()
        self.absences += 1
        with contextlib.suppress(OSError):  # it has ended
            self._wake = _pipe_of(self.pid, wake_fd)
        self._core.persist()  # if this agent dies, the next one must be able to wake the kernel
        if self._detaching is not None and not self._detaching.done():
            self._detaching.set_result(wake_fd)
        else:
            self.wake()  # it took so long that the caller of `detach` has given up

    def _stayed(self, error: ControlError) -> None:
        if self._detaching is not None and not self._detaching.done():
            self._detaching.set_exception(error)

    def wake(self) -> None:
        """Make a detached kernel reattach, unless it has been woken already."""
        wake, self._wake = self._wake, None
        if wake is None:
            return
        try:
            # Only the pipe it had when it detached: the number may be another file's by now.
            if _pipe_of(self.pid, wake[0]) == wake:
                self._write_line(wake[0], restored=False)
        except OSError as error:  # it has ended, which its watch notices, or has closed the pipe
            log.info("Session %s: its kernel cannot be woken: %s", self._core.id, error)

    def wake_restored(self, pid: int, wake_fd: int) -> None:
        """Make a process attach that was restored from images of a detached one.

        Raises
        ------
        ControlError
            If it does not wait for that.
        """
        self.take(pid)
        try:
            self._write_line(wake_fd, restored=True)
        except OSError as error:
            raise ControlError(f"Process {pid} cannot be woken: {error}", "unavailable") from error

    def _write_line(self, wake_fd: int, *, restored: bool) -> None:
        line = json.dumps({"restored": restored, "session": self._core.id}).encode() + b"\n"
        fd = os.open(f"/proc/{self.pid}/fd/{wake_fd}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    async def await_return(self) -> None:
        """Wait until a kernel reattaches whose process was to be saved.

        Its process manager wakes it; if that does not happen in time, this does.
        """
        try:
            await self.wait_joined(WAKE_SECONDS)
        except ControlError:
            log.warning("Session %s: its kernel was not woken", self._core.id)
            self.wake()

    # ---------------------------------------------------------------- messages to it

    @property
    def reachable(self) -> bool:
        """True if messages can be sent to it now."""
        return self._channel is not None

    @property
    def cells_ended(self) -> int:
        """Number of cells it has run, as far as known; see Note [Counting cells]."""
        return self.cells_before + self._state.memory.client.cells_ended

    def check_is(self, pid: int) -> None:
        """Raise ControlError if a process is not the kernel; before one attached, any may be."""
        if self.pid not in (None, pid):
            raise ControlError("Only the kernel itself can do that.", "not-allowed")

    async def send(self, message: Message) -> None:
        """Send the kernel a message.

        Raises
        ------
        ControlError
            If it is not connected.
        """
        try:
            if self._channel is None:
                raise ConnectionError("it is not connected")
            await self._channel.send(message)
        except OSError as error:
            raise ControlError(f"Its kernel cannot be reached: {error}.", "unavailable") from error

    # ---------------------------------------------------------------- outliving the agent

    def record(self) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """Return what `recover` needs: a JSON record, and named descriptors, which we still own."""
        pidfd = self._watch.pidfd if self._watch is not None else None
        record = {
            "pid": self.pid,
            "torch_version": self.torch_version,
            "wake": self._wake,
            "may_end": self.may_end,
            "awaits_another": self.awaits_another,
            "cells_before": self.cells_before,
            "continues": self.continues,
        }
        return record, [] if pidfd is None else [("watched", pidfd)]

    def recover(self, record: dict[str, Any], pidfd: int | None, *, asleep: bool) -> None:
        """Recover from the record of an agent that died; the kernel will attach again.

        Parameters
        ----------
        record : dict
        pidfd : int or None
            The connection takes ownership.
        asleep : bool
            True if there is no process.
        """
        self.pid, self.torch_version = record["pid"], record["torch_version"]
        self._wake = tuple(record["wake"]) if record["wake"] else None
        self.may_end = record["may_end"]
        self.awaits_another = record["awaits_another"]
        self.cells_before = record["cells_before"]
        self.continues = tuple(record.get("continues", ()))
        if pidfd is not None:
            self._watch_process(self.pid or 0, pidfd)
        elif self.may_end:
            self.ended = True
        elif not asleep and self.pid != 0:
            # It ended when the agent did. (Pid 0 is in another PID namespace: not watched.)
            self._core.close(KERNEL_ENDED, died=True)
        if self._core.request.parent:
            self.wake()  # other kernels are woken when their process managers connect


def _pipe_of(pid: int | None, fd: int) -> _Pipe:
    """Return the identity of a process's descriptor; raises OSError if there is none."""
    found = os.stat(f"/proc/{pid}/fd/{fd}")
    return fd, found.st_dev, found.st_ino
