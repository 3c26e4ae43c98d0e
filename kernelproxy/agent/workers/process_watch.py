"""Processes that are not the agent's children: notification of their end, and their memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path


class ProcessWatch:
    """Calls `on_end` once when a process ends (or has ended). Owns a pidfd until `close`.

    A process of another pid namespace (its pid is 0 here) cannot be watched and never ends.

    Parameters
    ----------
    pid : int
    on_end : callable
    pidfd : int, optional
        The pidfd of that process, if there is one already. Takes ownership.
    """

    def __init__(self, pid: int, on_end: Callable[[], object], pidfd: int | None = None) -> None:
        self._on_end, self._pidfd = on_end, -1
        if pid <= 0 and pidfd is None:
            return
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(pid) if pidfd is None else pidfd
        except ProcessLookupError:
            loop.call_soon(on_end)
        else:
            loop.add_reader(self._pidfd, self._fire)

    @property
    def pidfd(self) -> int | None:
        """Descriptor of the process; None if it is not watched."""
        return self._pidfd if self._pidfd >= 0 else None

    def _fire(self) -> None:
        self.close()
        self._on_end()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def memory_bytes(pid: int, *, shared: bool) -> int:
    """Return the bytes of a process and its descendants that are in no file, as far as visible.

    Parameters
    ----------
    pid : int
    shared : bool
        Include shared memory, which then counts once for each process that maps it.
    """
    found, ask = 0, [pid]
    wanted = {"RssAnon", "VmSwap", *(["RssShmem"] if shared else [])}
    while ask:
        root = Path("/proc") / str(ask.pop())
        with contextlib.suppress(OSError):  # it has ended
            for line in (root / "status").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in wanted:
                    found += int(rest.split()[0]) << 10
            for each in root.glob("task/*/children"):
                ask += map(int, each.read_text().split())
    return found
