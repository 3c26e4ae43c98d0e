"""Validation of descriptors that users send to the system daemon: they must not block it.

To read, to stat or even to close a file may wait for the server of its file system, which may be
the user's own process. So a descriptor that is not of memory, a process, or a file on a local disk
is not used; a separate thread closes it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from collections import Counter
from pathlib import Path
from typing import ClassVar

from kernelproxy.common.errors import ProtocolError, WorkerError
from kernelproxy.common.ipc.fair_share import Share
from kernelproxy.common.ipc.framing import Bounds
from kernelproxy.common.protocol.snapshot_tables import read_tables

#: File systems on disk or in memory that the OS kernel serves itself.
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs"}
_LOCAL |= {"xfs", "zfs"}
_HELD_BYTES_MAX = 32 << 20
_HELD_FDS_MAX = 32
#: Limits for messages of users; a kernel's description of a notebook is the longest one.
BOUNDS = Bounds(frame_bytes=8 << 20, values=100_000, fds=4)
#: Limit of a snapshot's file: 32 bytes for each storage, and the tables.
_SNAPSHOT_BYTES_MAX = 256 << 20
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Discards:
    """Closes unwanted descriptors in threads, a limited number at a time for each user."""

    MAX = 8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Counter[int] = Counter()

    def full(self, uid: int) -> bool:
        """True if a user has too many unclosed descriptors, and may open no more connections."""
        with self._lock:
            return self._pending[uid] >= self.MAX

    def close(self, uid: int, fd: int) -> None:
        """Close a descriptor in a thread, as the close may wait for its user."""
        with self._lock:
            self._pending[uid] += 1
        threading.Thread(target=self._run, args=(uid, fd), name="sing-close", daemon=True).start()

    def _run(self, uid: int, fd: int) -> None:
        os.close(fd)
        with self._lock:
            self._pending[uid] -= 1
            if not self._pending[uid]:
                del self._pending[uid]


#: The instance of this process.
_discards = Discards()


class Guard:
    """Protects the daemon from what a user sends over a connection.

    Parameters
    ----------
    uid : int
    discards : Discards, optional
        By default that of this process.
    share : Share, optional
        The user's share of the loop; no limit by default.
    """

    #: Bytes and descriptors of incomplete messages, by user.
    _held: ClassVar[Counter[int]] = Counter()
    _held_fds: ClassVar[Counter[int]] = Counter()

    def __init__(
        self, uid: int, discards: Discards = _discards, share: Share | None = None
    ) -> None:
        self.uid, self.share, self._discards = uid, share, discards
        self._mine = self._my_fds = 0

    def for_another(self) -> Guard:
        """Return a guard for another connection to processes of the same user."""
        return Guard(self.uid, self._discards, self.share)

    @property
    def full(self) -> bool:
        """See `Discards`."""
        return self._discards.full(self.uid)

    async def turn(self) -> None:
        """Wait until the user's next message may be processed: see Note [Fairness]."""
        if self.share is not None:
            await self.share.turn()

    def hold(self, count: int, fds: int = 0) -> None:
        """Record how many bytes and descriptors of an incomplete message this connection holds.

        Raises
        ------
        ProtocolError
            If all connections of the user together hold too many.
        """
        more, self._mine = count - self._mine, count
        more_fds, self._my_fds = fds - self._my_fds, fds
        for held, change in ((self._held, more), (self._held_fds, more_fds)):
            held[self.uid] += change
            if not held[self.uid]:
                del held[self.uid]
        if more > 0 and self._held[self.uid] > _HELD_BYTES_MAX:
            raise ProtocolError("Too much has come at once.")
        if more_fds > 0 and self._held_fds[self.uid] > _HELD_FDS_MAX:
            raise ProtocolError("Too many descriptors have come without their messages.")

    def discard(self, fd: int) -> None:
        """Close a descriptor that the user has sent."""
        if is_harmless(fd):
            os.close(fd)
        else:
            self._discards.close(self.uid, fd)

    def check(self, fds: list[int]) -> list[int]:
        """Return the descriptors that the user has sent, if they are accepted.

        Raises
        ------
        ProtocolError
            If one of them may block the daemon, or few descriptors are left; then all are closed.
        """
        scarce = any(map(is_scarce, fds)) and self.uid != 0
        if not scarce and all(map(is_harmless, fds)):
            return fds
        for fd in fds:
            self.discard(fd)
        if scarce:
            raise ProtocolError("The daemon has few descriptors left.")
        raise ProtocolError("A file came that is on no disk of this machine.")


def is_scarce(fd: int) -> bool:
    """True if a descriptor is one of the last that this process may have.

    Numbers are assigned from the lowest, and the last quarter is reserved for existing sessions.
    """
    return fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


def few_are_left() -> bool:
    """True if the next descriptor would be scarce."""
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return is_scarce(fd)


def is_harmless(fd: int) -> bool:
    """True if a descriptor is of memory, a process, or a file on a local disk.

    This makes no request to its file system.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return True
    except OSError:
        pass
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return "Pid" in fields or _type_of(fields["mnt_id"].strip()) in _LOCAL
    except (OSError, KeyError, ValueError):
        return False


def _type_of(mount: str) -> str:
    """Return the file system type of a mount id; raises KeyError if there is none."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ", 1)[0] == mount:
            return right.split(" ", 1)[0]
    raise KeyError(mount)


def fix_snapshot(fd: int) -> None:
    """Seal the file of a snapshot, which comes from a worker, so that it cannot change.

    Raises
    ------
    WorkerError
        If it cannot be sealed, or is too large.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED)
        fixed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED == _FIXED
    except OSError as error:
        raise WorkerError(f"A worker sent a snapshot that may change: {error}.") from error
    if not fixed or os.fstat(fd).st_size > _SNAPSHOT_BYTES_MAX:
        raise WorkerError("A worker sent a snapshot that may change, or is too large.")


def check_snapshot(fd: int, position: int, most: int) -> None:
    """Validate the file of a snapshot, before it is used.

    Parameters
    ----------
    fd : int
    position : int
        Position in the log, as reported by the worker.
    most : int
        Bytes that its device holds. The size in the file determines how much memory is allocated
        to store the snapshot.

    Raises
    ------
    WorkerError
        If it is of another position, or larger than its device.
    """
    tables = read_tables(fd)
    if tables.position != position or sum(each.count for each in tables.extents) > most:
        raise WorkerError("A worker sent a snapshot of what no device holds.")
