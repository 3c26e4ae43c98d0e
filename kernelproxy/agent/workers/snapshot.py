"""A snapshot that a worker has taken."""

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
