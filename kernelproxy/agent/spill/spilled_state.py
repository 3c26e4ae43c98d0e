"""The spilled state of one session, and its transfer back to memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kernelproxy.agent.spill.spill_store import Fetch, Job, SpillStore
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import StoreError
from kernelproxy.storage.manifest import Label, Manifest


class SpilledState:
    """The newest snapshot of a session that was spilled, if one was.

    Parameters
    ----------
    arena_fd : int
        Where its bytes come from and return to. Owned by the caller; open until after `close`.
    on_change : callable
        Called when `alone` has changed, before any other process can see that.
    """

    def __init__(self, arena_fd: int, on_change: Callable[[], object]) -> None:
        self.stored: Manifest | None = None
        #: True if the arena is empty, and its bytes are only in `stored`.
        self.alone = False
        self._arena_fd, self._on_change = arena_fd, on_change
        self._fetch: Fetch | None = None

    def store(self, cold: SpillStore, label: Label, snapshot: Snapshot) -> Job[Manifest]:
        """Begin to copy a snapshot to disk; if that fails, nothing is changed."""
        job = cold.put(label, snapshot, self._arena_fd, self.stored)
        job.task.add_done_callback(self._note)
        return job

    def _note(self, task: asyncio.Task[Manifest]) -> None:
        if task.exception() is None:
            self.stored = task.result()

    def rely_on_it(self) -> None:
        """Make the disk the only copy, so that the arena can be emptied."""
        self.alone = True
        self._on_change()

    def fetch(self, cold: SpillStore, on_end: Callable[[], object]) -> None:
        """Begin to read it back, if the disk has the only copy; a worker may start meanwhile.

        Raises
        ------
        StoreError
            If reading cannot begin.
        """
        if self.alone and self._fetch is None and self.stored is not None:
            self._fetch = cold.fetch(self.stored, self._arena_fd, on_end)

    @property
    def arrivals_fd(self) -> int | None:
        """Descriptor of the `Arrivals` for a worker; None if nothing is being read back."""
        return self._fetch.arrivals.fd if self._fetch else None

    @property
    def arrived(self) -> bool:
        """True if it was being read back, and all of it is in the arena."""
        return self._fetch is not None and self._fetch.complete

    @property
    def error(self) -> StoreError | None:
        """Why it cannot be read back; None if it can."""
        return self._fetch.error if self._fetch else None

    async def fetched(self) -> None:
        """Wait until all of it is in the arena, if it is being read back.

        Raises
        ------
        StoreError
            If it could not be read; it is still on disk.
        """
        if self._fetch is None:
            return
        await self._fetch.wait()
        error = self.error
        await self.close()
        if error is not None:
            raise error
        self.alone = False
        self._on_change()

    async def close(self) -> None:
        """Cancel reading back."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            await fetch.close()
