"""States of sessions on disk: the chunk store as the agent uses it, beside its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kernelproxy.agent.workers import Snapshot
from kernelproxy.errors import StoreError
from kernelproxy.oplog import PAGE_BYTES, Page, Word
from kernelproxy.snapshot.ledger import Limits
from kernelproxy.snapshot.manifest import Label, Manifest
from kernelproxy.snapshot.store import Store
from kernelproxy.snapshot.tables import read_tables
from kernelproxy.snapshot.together import Cancel

log = logging.getLogger(__name__)
T = TypeVar("T")

TABLES = "tables"
KIND = "session"


class Arrivals(Page):
    """Tells a worker which extents of its snapshot are in the arena (`native/worker/readiness.h`).

    Owns its memfd until `close`.

    Parameters
    ----------
    count : int
        Number of extents.
    """

    bell = Word(0, 4)

    def __init__(self, count: int) -> None:
        self._count = count
        self._wanted = PAGE_BYTES + -(-count // PAGE_BYTES) * PAGE_BYTES
        size = 2 * self._wanted - PAGE_BYTES
        self.fd = os.memfd_create("sing-arrivals", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, max(size, PAGE_BYTES))
        super().__init__(self.fd, writable=True, extra_bytes=max(size, PAGE_BYTES) - PAGE_BYTES)

    def arrived(self, index: int) -> None:
        """Say that an extent is in the arena."""
        self.memory[PAGE_BYTES + index] = 1
        self._ring()

    def failed(self) -> None:
        """Say that what is missing will not come."""
        for index in range(self._count):
            if self.memory[PAGE_BYTES + index] == 0:
                self.memory[PAGE_BYTES + index] = 2
        self._ring()

    def wanted(self) -> int | None:
        """An extent that the worker waits for."""
        wanted = bytes(self.memory[self._wanted : self._wanted + self._count])
        there = bytes(self.memory[PAGE_BYTES : PAGE_BYTES + self._count])
        found = wanted.find(1)
        while found >= 0 and there[found]:
            found = wanted.find(1, found + 1)
        return found if found >= 0 else None

    def _ring(self) -> None:
        self.bell = (self.bell + 1) & 0xFFFFFFFF
        self.wake(Arrivals.bell)

    def close(self) -> None:
        """Unmap it and give up the descriptor."""
        super().close()
        os.close(self.fd)


class Job(Generic[T]):
    """Work with the store, in a thread beside the loop.

    Parameters
    ----------
    work : callable
        Is given what ends it early.
    """

    def __init__(self, work: Callable[[Cancel], T]) -> None:
        self._cancel = Cancel()
        self.task = asyncio.create_task(asyncio.to_thread(work, self._cancel))

    async def end(self) -> None:
        """End it, if it goes on, and wait until it has ended."""
        self._cancel.set()
        await asyncio.wait({self.task})


class Fetch:
    """A state on its way from disk into its arena, while the worker runs already.

    Parameters
    ----------
    store : Store
    manifest : Manifest
    arena_fd : int
        Stays the caller's, who keeps it until `close` has returned.
    on_end : callable
        Called in the loop when it is complete or has failed; `error` says why.
    """

    def __init__(
        self, store: Store, manifest: Manifest, arena_fd: int, on_end: Callable[[], object]
    ) -> None:
        self.error: StoreError | None = None
        self.arrivals = Arrivals(len(manifest.extents))
        self._store, self._manifest, self._arena_fd = store, manifest, arena_fd
        self._on_end = on_end
        self._job = Job(self._get)
        self._job.task.add_done_callback(self._done)

    @property
    def complete(self) -> bool:
        """Whether all of it is in the arena."""
        return self._job.task.done() and self.error is None

    def _get(self, cancel: Cancel) -> None:
        os.ftruncate(
            self._arena_fd,
            max((each.offset + each.count for each in self._manifest.extents), default=0),
        )
        self._store.get(
            self._manifest,
            self._arena_fd,
            on_extent=self.arrivals.arrived,
            next_wanted=self.arrivals.wanted,
            cancel=cancel,
        )

    def _done(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        if error is not None:
            if not isinstance(error, StoreError):
                error = StoreError(str(error), "failed")
            self.error = error
            log.warning("A state could not be read from disk: %s", self.error)
            self.arrivals.failed()
        self._on_end()

    async def wait(self) -> None:
        """Wait until it is complete or has failed."""
        await asyncio.wait({self._job.task})

    async def close(self) -> None:
        """End it, if it goes on, and free what it has."""
        await self._job.end()
        self.arrivals.close()


class ColdStates:
    """Where states go that host memory has no room for.

    Parameters
    ----------
    directory : Path
        Of the store; made at first need.
    quota : int
        Bytes; 0 or less: nothing goes there.
    """

    def __init__(self, directory: Path, quota: int) -> None:
        self._directory, self._quota = directory, quota
        self._store: Store | None = None
        self._collecting: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether states may go to disk at all."""
        return self._quota > 0

    @property
    def there(self) -> bool:
        """Whether anything may have gone there."""
        return self._store is not None or self._directory.exists()

    def store(self) -> Store:
        """The store; raises StoreError if its directory cannot be used."""
        if self._store is None:
            self._store = Store(self._directory, limits=Limits(store=self._quota))
        return self._store

    def put(
        self, label: Label, snapshot: Snapshot, arena_fd: int, previous: Manifest | None
    ) -> Job[Manifest]:
        """Begin to store a snapshot; see `Store.put` for how that may fail."""

        def work(cancel: Cancel) -> Manifest:
            found = read_tables(snapshot.fd)
            raw = os.pread(snapshot.fd, os.fstat(snapshot.fd).st_size, 0)
            return self.store().put(
                label,
                arena_fd,
                found.extents,
                blobs={TABLES: raw},
                previous=previous,
                cancel=cancel,
            )

        return Job(work)

    def fetch(self, manifest: Manifest, arena_fd: int, on_end: Callable[[], object]) -> Fetch:
        """Begin to bring a state back; raises StoreError if the store cannot be used."""
        return Fetch(self.store(), manifest, arena_fd, on_end)

    async def forget(self, manifest: Manifest) -> None:
        """Delete a state and give back its space."""

        def work() -> None:
            with contextlib.suppress(StoreError):
                self.store().delete(manifest.label.owner, manifest.label.name)
            with contextlib.suppress(StoreError):  # somebody stores or reads: next time
                self.store().collect()

        await asyncio.to_thread(work)
