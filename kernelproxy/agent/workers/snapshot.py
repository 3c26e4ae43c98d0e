"""A snapshot that a worker has taken, also to move to another process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Snapshot:
    """All device state at one position of the log.

    Parameters
    ----------
    fd : int
        Memfd with its tables (see `kernelproxy.common.protocol.snapshot_tables`); owned until
        `close`. The bytes of storages are in the session's arena.
    position : int
    bytes : int
        Size of the state.
    copied : int
        Those of them that had changed since the previous snapshot.
    stalled_ns : int
        Nanoseconds for which taking it kept the log from being executed.
    seconds : float
        How long taking it took.
    omitted : int
        Number of storages whose bytes it lacks: see `moved.h`. If there are any, it is no base of a
        recovery.
    taken : float
        When it was complete, in seconds of the monotonic clock.
    """

    fd: int
    position: int
    bytes: int
    copied: int = 0
    stalled_ns: int = 0
    seconds: float = 0.0
    omitted: int = 0
    taken: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Free its tables."""
        os.close(self.fd)


@dataclass(frozen=True)
class Departure:
    """The files with which a session moves to a process of its job.

    Parameters
    ----------
    contents : int
        File of the contents of its storages; owned until `close`.
    partial : Snapshot, optional
        Without what the process has. None: the newest snapshot of the session has everything.
    """

    contents: int
    partial: Snapshot | None = None

    def close(self) -> None:
        """Free its files."""
        os.close(self.contents)
        if self.partial is not None:
            self.partial.close()
