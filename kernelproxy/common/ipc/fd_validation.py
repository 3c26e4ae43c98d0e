"""Descriptors that users send to the system daemon: only such as cannot make it wait.

To read a file, to look at it and even to close it may wait for whoever serves its file system,
which may be its user. What is none of memory, a process, or a file on a disk of this machine is
closed by a thread of its own, unseen by anybody else.
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

#: File systems of a disk or of memory, which the kernel serves itself.
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs"}
_LOCAL |= {"xfs", "zfs"}
_HELD_BYTES_MAX = 32 << 20
_HELD_FDS_MAX = 32
#: What users send: a kernel's description of a notebook is what is longest.
BOUNDS = Bounds(frame_bytes=8 << 20, values=100_000, fds=4)
#: Of a snapshot: 32 for each storage, and the tables.
_SNAPSHOT_BYTES_MAX = 256 << 20
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Discards:
    """Closes what nobody wants, of each user so much at a time."""

    MAX = 8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Counter[int] = Counter()

    def full(self, uid: int) -> bool:
        """Whether a user has sent so much that still cannot be closed that he is heard no more."""
        with self._lock:
            return self._pending[uid] >= self.MAX

    def close(self, uid: int, fd: int) -> None:
        """Close a descriptor, in a thread that may wait for its user."""
        with self._lock:
            self._pending[uid] += 1
        threading.Thread(target=self._run, args=(uid, fd), name="sing-close", daemon=True).start()

    def _run(self, uid: int, fd: int) -> None:
        os.close(fd)
        with self._lock:
            self._pending[uid] -= 1
            if not self._pending[uid]:
                del self._pending[uid]


#: Of this process.
_discards = Discards()


class Guard:
    """What stands between a user's end of a connection and the daemon.

    Parameters
    ----------
    uid : int
    discards : Discards, optional
        By default those of this process.
    share : Share, optional
        What the user may take of the loop; by default all.
    """

    #: Bytes and descriptors of messages that are not whole yet, of each user.
    _held: ClassVar[Counter[int]] = Counter()
    _held_fds: ClassVar[Counter[int]] = Counter()

    def __init__(
        self, uid: int, discards: Discards = _discards, share: Share | None = None
    ) -> None:
        self.uid, self.share, self._discards = uid, share, discards
        self._mine = self._my_fds = 0

    @property
    def full(self) -> bool:
        """See `Discards`."""
        return self._discards.full(self.uid)

    async def turn(self) -> None:
        """Wait until the user may be heard: see Note [Fairness]."""
        if self.share is not None:
            await self.share.turn()

    def hold(self, count: int, fds: int = 0) -> None:
        """Note how many bytes and descriptors of a message that is not whole yet have come over
        this connection.

        Raises
        ------
        ProtocolError
            If that is too much, with what has come over others of the same user.
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
        """Close a descriptor that came from there."""
        if is_harmless(fd):
            os.close(fd)
        else:
            self._discards.close(self.uid, fd)

    def check(self, fds: list[int]) -> list[int]:
        """Return descriptors that came from there.

        Raises
        ------
        ProtocolError
            If one of them may make us wait; then all are closed.
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
    """Whether a descriptor is one of the last that this process may have.

    They are numbered from below, and a quarter of them is for the sessions that there are.
    """
    return fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


def few_are_left() -> bool:
    """Whether the next descriptor would be scarce."""
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return is_scarce(fd)


def is_harmless(fd: int) -> bool:
    """Whether a descriptor is of memory, a process, or a file on a disk of this machine.

    Its file system is not asked.
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
    """Type of the file system that is mounted by a number; raises KeyError if none is here."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ", 1)[0] == mount:
            return right.split(" ", 1)[0]
    raise KeyError(mount)


def fix_snapshot(fd: int) -> None:
    """See that the file of a snapshot, which comes from a worker, stays as it is.

    Raises
    ------
    WorkerError
        If that cannot be.
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
    """Look at the file of a snapshot, before anybody relies on it.

    Parameters
    ----------
    fd : int
    position : int
        Of the log, as its worker says.
    most : int
        Bytes that its device holds: whoever stores it takes memory by what it says it has.

    Raises
    ------
    WorkerError
        If it is none of that position, or of more than its device holds.
    """
    tables = read_tables(fd)
    if tables.position != position or sum(each.count for each in tables.extents) > most:
        raise WorkerError("A worker sent a snapshot of what no device holds.")
