"""Being told when a process that is not our child ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Calls `on_end` once when a process ends (or has ended). Owns a pidfd until `close`.

    A process of another pid namespace (its pid is 0 here) cannot be watched and never ends.

    Parameters
    ----------
    pid : int
    on_end : callable
    pidfd : int, optional
        Of that process, if there is one already; owned from now on.
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
        """Stop watching; doing it twice is no error."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
