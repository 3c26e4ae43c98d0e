"""A snapshot that a worker has taken, and the state that a session brings to another process."""

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


@dataclass(frozen=True)
class Departure:
    """State of a session that departs to a process of its job: see `moved.h`.

    No base of a recovery.

    Parameters
    ----------
    tables, contents, carried : int
        The files of `Departed`; owned until `close`.
    omitted : int
        Number of storages whose bytes the process has.
    copied : int
        Bytes in `carried`.
    """

    tables: int
    contents: int
    carried: int
    omitted: int
    copied: int

    def close(self) -> None:
        """Free its files."""
        for fd in (self.tables, self.contents, self.carried):
            os.close(fd)
