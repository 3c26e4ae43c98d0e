"""Spilled states of sessions: the chunk store as the agent uses it, off its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import StoreError
from kernelproxy.common.protocol.snapshot_tables import read_tables
from kernelproxy.common.shared_memory import PAGE_BYTES, SEALS, Page, Word
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Label, Manifest
from kernelproxy.storage.quota import StoreLimits
from kernelproxy.storage.threads import Cancel

log = logging.getLogger(__name__)
T = TypeVar("T")

TABLES = "tables"
KIND = "session"


class Arrivals(Page):
    """Page that shows a worker which extents of its snapshot are in the arena.

    See `native/worker/snapshot/readiness.h`. Owns its memfd until `close`.

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
        self.fd = os.memfd_create("sing-arrivals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, max(size, PAGE_BYTES))
        # If the worker could shrink the file, access to it here would raise SIGBUS.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        super().__init__(self.fd, writable=True, extra_bytes=max(size, PAGE_BYTES) - PAGE_BYTES)

    def arrived(self, index: int) -> None:
        """Mark an extent as being in the arena."""
        self.memory[PAGE_BYTES + index] = 1
        self._ring()

    def failed(self) -> None:
        """Mark the extents that are missing as failed: they will not come."""
        for index in range(self._count):
            if self.memory[PAGE_BYTES + index] == 0:
                self.memory[PAGE_BYTES + index] = 2
        self._ring()

    def wanted(self) -> int | None:
        """Return an extent that the worker waits for, if any."""
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
        """Unmap it and close the descriptor."""
        super().close()
        os.close(self.fd)


class Job(Generic[T]):
    """Work on the store, in a thread off the event loop.

    Parameters
    ----------
    work : callable
        Receives a `Cancel`, which ends it early.
    """

    def __init__(self, work: Callable[[Cancel], T]) -> None:
        self._cancel = Cancel()
        self.task = asyncio.create_task(asyncio.to_thread(work, self._cancel))

    async def end(self) -> None:
        """Cancel it, if it still runs, and wait until it has ended."""
        self._cancel.set()
        await asyncio.wait({self.task})


class Fetch:
    """Transfer of a state from disk into its arena, while the worker runs already.

    Parameters
    ----------
    store : Store
    manifest : Manifest
    arena_fd : int
        Owned by the caller, which keeps it open until `close` has returned.
    on_end : callable
        Called in the loop when it is complete or has failed; then `error` is the reason.
    """

    def __init__(
        self, store: ChunkStore, manifest: Manifest, arena_fd: int, on_end: Callable[[], object]
    ) -> None:
        self.error: StoreError | None = None
        self.arrivals = Arrivals(len(manifest.extents))
        self._store, self._manifest, self._arena_fd = store, manifest, arena_fd
        self._on_end = on_end
        self._job = Job(self._get)
        self._job.task.add_done_callback(self._done)

    @property
    def complete(self) -> bool:
        """True if all of it is in the arena."""
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
        """Cancel it, if it still runs, and free what it has."""
        await self._job.end()
        self.arrivals.close()


class SpillStore:
    """Store of spilled states, for which host memory has no room.

    Parameters
    ----------
    directory : Path
        Directory of the store; made when it is first needed.
    quota : int
        Bytes; 0 or less: nothing is spilled.
    mark : DaemonId
        The tag of this daemon.
    beside : callable, optional
        Returns the bytes outside of the store that count against the quota, too. May block.
    """

    def __init__(
        self, directory: Path, quota: int, mark: DaemonId, beside: Callable[[], int] = lambda: 0
    ) -> None:
        self._directory, self._quota, self._mark = directory, quota, mark
        self._beside = beside
        self._store: ChunkStore | None = None
        self._of_users: dict[str, int] = {}
        self._made: set[str] = set()  # ids of sessions whose states this process has labelled
        self._collecting: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """True if states may be spilled at all."""
        return self._quota > 0

    @property
    def there(self) -> bool:
        """True if there may be anything in the store."""
        return self._store is not None or self._directory.exists()

    def store(self) -> ChunkStore:
        """Return the store; raises StoreError if its directory cannot be used."""
        if self._store is None:
            limits = StoreLimits(store=self._quota, payers=self._of_users)
            self._store = ChunkStore(self._directory, limits=limits, beside=self._beside)
        return self._store

    def allow(self, user: str, quota: float | None) -> None:
        """Limit a user's bytes of states and checkpoints; None or `math.inf`: no limit."""
        if quota is None or quota == math.inf:
            self._of_users.pop(user, None)
        else:
            self._of_users[user] = int(quota)

    def left(self, user: str) -> int:
        """Return the bytes that a user may still use. Blocks; StoreError if they are not known."""
        if not self.usable:
            return 0
        used = self.store().usage() if self.there else 0
        left = self._quota - used - self._beside()
        if (own := self._of_users.get(user)) is not None:
            left = min(left, own - (self.store().usage(user) if self.there else 0))
        return max(0, left)

    def label(
        self,
        session: str,
        name: str,
        owner: int,
        user: str,
        torch: str,
        device_kind: str,
        position: int,
    ) -> Label:
        """Return a label for the state of a session: its id, name and user, and see `Label`."""
        self._made.add(session)
        meta = {"name": name, "user": user, "daemon": self._mark.record}
        return Label(str(owner), session, KIND, torch, device_kind, position, meta)

    def put(
        self, label: Label, snapshot: Snapshot, arena_fd: int, previous: Manifest | None
    ) -> Job[Manifest]:
        """Begin to store a snapshot; for its errors see `ChunkStore.put`."""

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
        """Begin to read a state back; raises StoreError if the store cannot be used."""
        return Fetch(self.store(), manifest, arena_fd, on_end)

    async def forget(self, manifest: Manifest) -> None:
        """Delete a state and free its space."""

        def work() -> None:
            with contextlib.suppress(StoreError):
                self.store().delete(manifest.label.owner, manifest.label.name)
            with contextlib.suppress(StoreError):  # the store is in use: the next call collects
                self.store().collect()

        await asyncio.to_thread(work)

    def tidy(self, kept: Iterable[str]) -> None:
        """Delete states of dead daemons, and of this one except those of the sessions `kept`.

        Blocks. States that are made meanwhile stay.
        """
        if not self.there:
            return
        try:
            store = self.store()
            left = [(owner, name) for owner, name in store.names() if self._is_left(owner, name)]
            # A state is labelled before it is stored, so `_made` has all new ones listed above.
            for owner, name in left:
                if name not in self._made.union(kept):
                    store.delete(owner, name)
                    log.info("The state of session %s is deleted: no session can use it", name)
            if left:
                store.collect()
        except StoreError as error:  # the next daemon tries again
            log.warning("What is left on disk stays there: %s", error)

    def _is_left(self, owner: str, name: str) -> bool:
        """Return True if a snapshot is a state of this daemon, or of one that is gone."""
        try:
            label = self.store().load(owner, name).label
        except StoreError:
            return False
        daemon = label.meta.get("daemon")
        ours = self._mark.is_ours(daemon) or self._mark.is_orphan(daemon)
        return label.kind == KIND and ours
