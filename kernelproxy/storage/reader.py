"""Reader of one stored snapshot, in an order that may change while it is read.

Some threads only read from the disk. They sleep nearly all the time, so the OS gives them a core as
soon as a disk request is complete, and the disk gets its next request at once, while other threads
hash and write on all cores. If each thread did everything for one chunk, the disk would be idle
while threads wait for a core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from kernelproxy.storage.chunk_file import BufferPool, ChunkBuffer, ChunkFiles
from kernelproxy.storage.manifest import Manifest, cut
from kernelproxy.storage.threads import Cancel, work_together

#: With fewer threads or chunks, work is not divided; and one in this many threads verifies.
_APART = 3
#: Extra buffers, besides one for each thread, for chunks that are read and wait.
_WAITING = 4


class _ChunkRead(NamedTuple):
    """A chunk and its destination: extent, offset in the file, key."""

    extent: int
    offset: int
    key: str


class _Loaded(NamedTuple):
    """A chunk's file as it was read, and its length in the buffer."""

    piece: _ChunkRead
    buffer: ChunkBuffer
    length: int


class _Checked(NamedTuple):
    """The verified content of a chunk, in the buffer's memory."""

    piece: _ChunkRead
    buffer: ChunkBuffer
    content: memoryview


class _ReadSequence:
    """Chunks of a snapshot in the sequence in which they are read: wanted extents come first.

    Parameters
    ----------
    manifest : Manifest
    next_wanted : callable, optional
        See `ChunkStore.get`.
    """

    def __init__(self, manifest: Manifest, next_wanted: Callable[[], int | None] | None) -> None:
        self._extents, self._next_wanted = manifest.extents, next_wanted
        self._pieces = [
            iter(list(zip(cut(extent.count, manifest.chunk_bytes), keys, strict=True)))
            for extent, keys in zip(manifest.extents, manifest.extent_chunks, strict=True)
        ]
        self._order: Iterator[int] = iter(range(len(self._pieces)))
        self._current: int | None = None

    def take(self) -> _ChunkRead | None:
        """Return the next chunk to read; None: there is none left."""
        wanted = self._next_wanted() if self._next_wanted is not None else None
        if wanted is not None and (found := self._take_of(wanted)):
            return found
        while True:
            if self._current is None:
                self._current = next(self._order, None)
                if self._current is None:
                    return None
            if found := self._take_of(self._current):
                return found
            self._current = None

    def _take_of(self, index: int) -> _ChunkRead | None:
        piece = next(self._pieces[index], None)
        if piece is None:
            return None
        (at, _), key = piece
        return _ChunkRead(index, self._extents[index].offset + at, key)


class SnapshotRead:
    """Job that reads one manifest's extents into a file; the caller holds the store's lock.

    Parameters
    ----------
    files : ChunkFiles
        Files of the chunks.
    buffer_pool : BufferPool
        Pool of I/O buffers.
    manifest : Manifest
        Manifest of the snapshot.
    fd : int
        Destination file; each extent is written at its offset.
    on_extent, next_wanted, progress : callable, optional
        See `ChunkStore.get`.
    """

    def __init__(
        self,
        files: ChunkFiles,
        buffer_pool: BufferPool,
        manifest: Manifest,
        fd: int,
        on_extent: Callable[[int], object] | None,
        next_wanted: Callable[[], int | None] | None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._files, self._buffer_pool, self._manifest, self._fd = files, buffer_pool, manifest, fd
        self._on_extent, self._progress = on_extent, progress
        self._sequence = _ReadSequence(manifest, next_wanted)
        self._left = [len(keys) for keys in manifest.extent_chunks]
        self._lock = threading.Lock()
        self._failed = False
        self._checkers = self._readers = self._reading = self._checking = self._buffers_left = 0
        # At its end, each queue has one None for each of its consumers.
        self._free: SimpleQueue[ChunkBuffer | None] = SimpleQueue()
        self._loaded: SimpleQueue[_Loaded | None] = SimpleQueue()
        self._checked: SimpleQueue[_Checked | None] = SimpleQueue()

    def run(self, threads: int, cancel: Cancel) -> None:
        """Read everything."""
        for index, left in enumerate(self._left):
            if not left:
                self._finished(index)
        with self._buffer_pool.lend(self._manifest.chunk_bytes) as self._take_buffer:
            if min(threads, sum(self._left)) < _APART:
                work_together(1, self._one_by_one, cancel)
            else:
                self._run_apart(threads, cancel)

    def _run_apart(self, threads: int, cancel: Cancel) -> None:
        self._checkers = self._checking = threads // _APART
        self._readers = self._reading = threads - self._checkers - 1
        self._buffers_left = threads + _WAITING
        roles = iter(
            [self._read_all] * self._readers
            + [self._check_all] * self._checkers
            + [self._write_all]
        )

        def begin() -> Callable[[], bool]:
            with self._lock:
                role = next(roles)
            return lambda: role(cancel)

        work_together(threads, begin, cancel, self._give_up)

    def _one_by_one(self) -> Callable[[], bool]:
        """Return a step in which one thread reads, verifies and writes a chunk."""
        buffer = self._take_buffer()

        def step() -> bool:
            piece = self._sequence.take()
            if piece is not None:
                self._write(
                    self._check(_Loaded(piece, buffer, self._files.load(buffer, piece.key)))
                )
            return piece is not None

        return step

    def _give_up(self) -> None:
        """Wake and end all threads after one of them has failed."""
        self._failed = True
        for _ in range(self._readers):
            self._free.put(None)
        for _ in range(self._checkers):
            self._loaded.put(None)
        self._checked.put(None)

    def _read_all(self, cancel: Cancel) -> bool:
        """Read chunks into buffers until none is left."""
        while (buffer := self._find_buffer()) is not None and not self._failed:
            cancel.check()
            with self._lock:
                piece = self._sequence.take()
                if piece is None:
                    self._reading -= 1
                    if self._reading == 0:
                        for _ in range(self._checkers):
                            self._loaded.put(None)
                    break
            self._loaded.put(_Loaded(piece, buffer, self._files.load(buffer, piece.key)))
        return False

    def _find_buffer(self) -> ChunkBuffer | None:
        """Return a new or free buffer, and wait until there is one; None: the job has failed."""
        with self._lock:
            make = self._free.empty() and self._buffers_left > 0
            self._buffers_left -= make
        return self._take_buffer() if make else self._free.get()

    def _check_all(self, cancel: Cancel) -> bool:
        """Verify chunks that were read."""
        while (loaded := self._loaded.get()) is not None and not self._failed:
            cancel.check()
            self._checked.put(self._check(loaded))
        with self._lock:
            self._checking -= 1
            if self._checking == 0:
                self._checked.put(None)
        return False

    def _check(self, loaded: _Loaded) -> _Checked:
        (_, _, key), buffer, length = loaded
        content = self._files.verified(buffer, length, key, self._manifest.chunks[key])
        return _Checked(loaded.piece, buffer, content)

    def _write_all(self, cancel: Cancel) -> bool:
        """Write verified chunks. Only one thread does, as the OS serialises writes to a file."""
        while (checked := self._checked.get()) is not None and not self._failed:
            cancel.check()
            self._write(checked)
            self._free.put(checked.buffer)
        return False

    def _write(self, checked: _Checked) -> None:
        (index, offset, _), _, content = checked
        done = 0
        while done < len(content):
            done += os.pwrite(self._fd, content[done:], offset + done)
        if self._progress is not None:
            self._progress(len(content))
        self._left[index] -= 1
        if not self._left[index]:
            self._finished(index)

    def _finished(self, index: int) -> None:
        if self._on_extent is not None:
            self._on_extent(index)
