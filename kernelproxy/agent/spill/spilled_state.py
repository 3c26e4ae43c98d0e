"""What a session has on disk, and its way back from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kernelproxy.agent.spill.spill_store import ColdStates, Fetch, Job
from kernelproxy.agent.workers.worker import Snapshot
from kernelproxy.common.errors import StoreError
from kernelproxy.storage.manifest import Label, Manifest


class OnDisk:
    """The newest snapshot of a session that went to disk, if one did.

    Parameters
    ----------
    arena_fd : int
        Where its bytes come from and return to. Stays the caller's, until after `close`.
    on_change : callable
        Called when `alone` has changed, before anybody could know of it.
    """

    def __init__(self, arena_fd: int, on_change: Callable[[], object]) -> None:
        self.stored: Manifest | None = None
        #: Whether the arena is empty, and its bytes are in `stored` alone.
        self.alone = False
        self._arena_fd, self._on_change = arena_fd, on_change
        self._fetch: Fetch | None = None

    def store(self, cold: ColdStates, label: Label, snapshot: Snapshot) -> Job[Manifest]:
        """Begin to copy a snapshot to disk; when that has failed, all is as it was."""
        job = cold.put(label, snapshot, self._arena_fd, self.stored)
        job.task.add_done_callback(self._note)
        return job

    def _note(self, task: asyncio.Task[Manifest]) -> None:
        if task.exception() is None:
            self.stored = task.result()

    def rely_on_it(self) -> None:
        """Let the arena be emptied, as all of it is here."""
        self.alone = True
        self._on_change()

    def fetch(self, cold: ColdStates, on_end: Callable[[], object]) -> None:
        """Begin to bring it back, if it is here alone; a worker may start meanwhile.

        Raises
        ------
        StoreError
            If it cannot be begun.
        """
        if self.alone and self._fetch is None and self.stored is not None:
            self._fetch = cold.fetch(self.stored, self._arena_fd, on_end)

    @property
    def arrivals_fd(self) -> int | None:
        """What tells a worker which parts have come back; None if nothing is on its way."""
        return self._fetch.arrivals.fd if self._fetch else None

    @property
    def arrived(self) -> bool:
        """Whether what was on its way has come back."""
        return self._fetch is not None and self._fetch.complete

    @property
    def error(self) -> StoreError | None:
        """Why it cannot come back."""
        return self._fetch.error if self._fetch else None

    async def fetched(self) -> None:
        """Wait until all of it is in the arena, if it is on its way.

        Raises
        ------
        StoreError
            If it could not be read; it is on disk still.
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
        """End what is on its way."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            await fetch.close()
