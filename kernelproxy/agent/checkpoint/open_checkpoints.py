"""Open checkpoints: all callers that open one share what was read of it.

Note [In use]: a caller that opened a checkpoint has descriptors of its files, and may map them and
pass them on. So the end of its connection does not show that the files are unused. The system shows
it: it grants a write lease (`F_SETLEASE`) only for a file that no other process has open or mapped.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernelproxy.agent.checkpoint.progress import Note
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import CheckpointOpened
from kernelproxy.storage.manifest import Manifest

#: Interval of checking whether open checkpoints are still in use.
POLL_SECONDS = 1.0
#: Number of checkpoints that a user may have open in addition to one for each of their sessions; a
#: session may continue to use what it restored.
SPARE = 4

Read = Callable[[Note], tuple[CheckpointOpened, list[int]]]


@dataclass(eq=False)
class OpenedCheckpoint:
    """One checkpoint that is being read, or is open.

    Parameters
    ----------
    owner : int
    manifest : Manifest
    process : bool
        True if it is open for its process.
    """

    owner: int
    manifest: Manifest
    process: bool
    reading: asyncio.Task[tuple[CheckpointOpened, list[int]]] = field(init=False)
    #: Callbacks of the waiters, for progress.
    waiting: list[Note] = field(default_factory=list)

    def note(self, done: int, total: int) -> None:
        """Report progress to all waiters."""
        for each in tuple(self.waiting):
            each(done, total)

    def in_use(self) -> bool:
        """Return True if a caller waits for it, or a process has its files open or mapped."""
        if self.waiting or not self.reading.done():
            return True
        return any(_in_use(fd) for fd in self.reading.result()[1])


class OpenCheckpoints:
    """The open checkpoints of all users."""

    def __init__(self) -> None:
        self._open: list[OpenedCheckpoint] = []
        self._timer: asyncio.TimerHandle | None = None

    async def open(
        self,
        owner: int,
        manifest: Manifest,
        read: Read,
        note: Note,
        *,
        process: bool,
        sessions: int,
    ) -> tuple[CheckpointOpened, list[int]]:
        """Read a checkpoint, unless it is open already.

        Parameters
        ----------
        owner : int
        manifest : Manifest
        read : callable
            Reads it, in a thread; returns the reply and read-only descriptors.
        note : callable
            Called with the bytes read and in total, in any thread.
        process : bool
            As in `OpenedCheckpoint`.
        sessions : int
            Number of sessions of its owner.

        Returns
        -------
        tuple
            The reply, and descriptors that the caller owns.

        Raises
        ------
        ControlError
            ``too-many``, if its owner has too many other checkpoints open.
        Exception
            What `read` raises.
        """
        found = self._find(owner, manifest, process) or self._begin(
            OpenedCheckpoint(owner, manifest, process), read, sessions
        )
        found.waiting.append(note)
        try:
            reply, fds = await asyncio.shield(found.reading)
            return reply, _reopened(fds)
        finally:
            found.waiting.remove(note)

    def _find(self, owner: int, manifest: Manifest, process: bool) -> OpenedCheckpoint | None:
        for each in self._open:
            if (each.owner, each.process, each.manifest) == (owner, process, manifest):
                return each
        return None

    def _begin(self, opening: OpenedCheckpoint, read: Read, sessions: int) -> OpenedCheckpoint:
        self._release()
        most = SPARE + sessions
        if sum(each.owner == opening.owner for each in self._open) >= most:
            raise ControlError(
                f"You have {most} checkpoints open already: end a program that uses one of them.",
                "too-many",
            )
        opening.reading = asyncio.create_task(asyncio.to_thread(read, opening.note))
        opening.reading.add_done_callback(lambda task: self._ended(opening, task))
        self._open.append(opening)
        self._schedule_check()
        return opening

    def _ended(self, opening: OpenedCheckpoint, task: asyncio.Task[object]) -> None:
        """Drop a checkpoint that could not be read; the waiters get the exception of the task."""
        if task.cancelled() or task.exception() is not None:
            self._open.remove(opening)

    def _release(self) -> None:
        """Close the checkpoints that are not in use any more."""
        for each in tuple(self._open):
            if not each.in_use():
                self._open.remove(each)
                for fd in each.reading.result()[1]:
                    os.close(fd)

    def _schedule_check(self) -> None:
        if self._timer is None and self._open:
            self._timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._release()
        self._schedule_check()


def _reopened(fds: Sequence[int]) -> list[int]:
    """Open the same files again, each with a position of its own."""
    found: list[int] = []
    try:
        for fd in fds:
            found.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for fd in found:
            os.close(fd)
        raise
    return found


def _in_use(fd: int) -> bool:
    """Return True if another process has a file open or mapped; see Note [In use]."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        # Another error: its file system has no leases, such as NFS. The memory files that are
        # handed out with it have them.
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
