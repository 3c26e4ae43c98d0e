"""Process to be saved, as seen from outside its sandbox."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from kernelproxy.common.ipc.fd_wait import readable
from kernelproxy.criu import images
from kernelproxy.criu.process_tree import status, tree

END_SECONDS = 60.0
#: A short transaction, as of IPython's history, takes about as long.
TRANSACTION_POLL_SECONDS = 0.01


class Target:
    """Process in a sandbox; used as a context manager.

    Parameters
    ----------
    pid : int
        Process id, as seen here.

    Raises
    ------
    OSError
        If there is no such process.
    """

    def __init__(self, pid: int) -> None:
        found = status(pid)
        self.pid = pid
        self.inner_pid = int(found["NSpid"].split()[-1])
        # The first process in the sandbox still has the outputs that this one has inherited.
        self._outlets = [os.readlink(f"/proc/{found['PPid']}/fd/{fd}") for fd in (1, 2)]
        self._locks = _locks_of(pid)

    def __enter__(self) -> Target:
        self._fd = os.pidfd_open(self.pid)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @contextmanager
    def continued_on_failure(self) -> Iterator[None]:
        """Let the process continue if it was stopped and a later step fails."""
        try:
            yield
        except BaseException:
            for each in tree(self.pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)
            raise

    def wait_for_transactions(self, seconds: float) -> list[str]:
        """Wait until no SQLite database has an open transaction, or for so many seconds.

        Returns
        -------
        list of str
            Databases that still have one.
        """
        deadline = time.monotonic() + seconds
        while databases := images.databases_in_transaction(_open_files(self.pid)):
            left = deadline - time.monotonic()
            if left <= 0 or readable(self._fd, min(left, TRANSACTION_POLL_SECONDS)):
                break
        return databases

    def describe(self, kind: str, wake_fd: int, mapped: list[images.Mapped]) -> images.Info:
        """Return the information that the images lack."""
        offsets = _offsets(self.pid)
        monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + offsets.get("monotonic", 0)
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + offsets.get("boottime", 0)
        return images.Info(
            kind=kind,
            pid=self.inner_pid,
            wake_fd=wake_fd,
            uid=os.geteuid(),
            outlets=self._outlets,
            monotonic=monotonic,
            boottime=boottime,
            locks=self._locks,
            mapped=[asdict(each) for each in mapped],
            as_root=kind == "user" and _root_within(self.pid),
        )

    def end(self) -> None:
        """End the process, and wait until it has ended: freeing its memory may take a while."""
        with suppress(ProcessLookupError):  # it has ended already
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        readable(self._fd, END_SECONDS)  # after a timeout, it cannot be undone either


def _root_within(pid: int) -> bool:
    """True if the only user of a process's sandbox is root there."""
    return Path(f"/proc/{pid}/uid_map").read_text("ascii").split()[0] == "0"


def _offsets(pid: int) -> dict[str, int]:
    """Return how far a process's clocks are ahead of ours, in nanoseconds."""
    offsets = {}
    with suppress(FileNotFoundError):  # a kernel without time namespaces
        for line in Path(f"/proc/{pid}/timens_offsets").read_text("ascii").splitlines():
            name, seconds, nanoseconds = line.split()
            offsets[name] = int(seconds) * 10**9 + int(nanoseconds)
    return offsets


def clocks(info: images.Info) -> list[str]:
    """Return launcher options that keep clocks from going back; as root, CRIU does this."""
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    if info.kind == "root" or (monotonic >= info.monotonic and boottime >= info.boottime):
        return []
    wanted = max(monotonic, info.monotonic), max(boottime, info.boottime)
    return ["--monotonic", str(wanted[0]), "--boottime", str(wanted[1])]


def _locks_of(pid: int) -> list[str]:
    """Return files that a process or one of its children may have locked."""
    family = {str(each) for each in tree(pid)}
    # Locks that belong to an open file description, not to a process, have no process id.
    return sorted({inode for owner, inode in _lock_table() if owner in family or owner == "-1"})


def locked(inodes: list[str]) -> bool:
    """True if one of these files is locked now: waiting for its lock could block forever."""
    return bool(set(inodes) & {inode for _, inode in _lock_table()})


def _lock_table() -> list[tuple[str, str]]:
    """Return the process, and the device with inode, of each lock that is held."""
    rows = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
    return [(row[4], row[5]) for row in rows if len(row) >= 6 and row[1] != "->"]


def _open_files(pid: int) -> Iterator[str]:
    """Yield the paths of the files that a process and its descendants have open."""
    for each in tree(pid):
        for entry in Path(f"/proc/{each}/fd").glob("*"):
            with suppress(OSError):  # closed meanwhile
                yield os.readlink(entry)


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and all its descendants."""
    total = 0
    for each in tree(pid):
        with suppress(OSError):
            pages = int(Path(f"/proc/{each}/statm").read_text("ascii").split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total
