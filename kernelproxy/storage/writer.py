"""Writer of one snapshot: it finds the chunks that exist already, and writes the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernelproxy.common.errors import InternalError, StoreError
from kernelproxy.storage.chunk_file import BufferPool, ChunkBuffer, ChunkFiles, sync_directory
from kernelproxy.storage.manifest import Extent, Manifest, Size, cut
from kernelproxy.storage.optional_deps import hash_of
from kernelproxy.storage.quota import RemainingQuota
from kernelproxy.storage.threads import Cancel, work_together

Progress = Callable[[int, int], object]
_DIRECTORY_THREADS = 8


@dataclass(frozen=True)
class Part:
    """Range of a file, as the content of a blob; it must not change while it is stored."""

    fd: int
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Kept:
    """Blob of an earlier snapshot, as the content of a blob with the same bytes; it is not read."""

    manifest: Manifest
    name: str

    def __len__(self) -> int:
        return self.manifest.blobs[self.name].count


@dataclass(frozen=True)
class _ChunkWrite:
    """Bytes of one chunk, and the place for its key."""

    fill: Callable[[memoryview, int], None]
    offset: int
    count: int
    keys: list[str]
    number: int


def _from_file(fd: int) -> Callable[[memoryview, int], None]:
    def fill(view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            step = os.preadv(fd, [view[done:]], offset + done)
            if not step:
                raise InternalError(f"a file ends at {offset + done}, inside what is to be stored")
            done += step

    return fill


class Putting:
    """Job that stores one snapshot; the caller holds the store's lock.

    Parameters
    ----------
    files : ChunkFiles
        Files of the chunks.
    buffer_pool : BufferPool
        Pool of I/O buffers.
    named : dict of str to int
        Lengths of the files of all chunks that published manifests name.
    allowance : Allowance
        Remaining quota.
    chunk_bytes : int
        Length of a chunk.
    progress : callable, optional
        See `Store.put`.
    """

    def __init__(
        self,
        files: ChunkFiles,
        buffer_pool: BufferPool,
        named: Mapping[str, int],
        allowance: RemainingQuota,
        chunk_bytes: int,
        progress: Progress | None,
    ) -> None:
        #: Every chunk so far.
        self.chunks: dict[str, Size] = {}
        self._files, self._named, self._allowance = files, named, allowance
        self._buffer_pool = buffer_pool
        self._chunk_bytes, self._progress = chunk_bytes, progress
        self._pieces: list[_ChunkWrite] = []
        self._done = self._total = 0
        self._unsynced: set[str] = set()
        self._lock = threading.Lock()

    def add_blob(self, content: bytes | Part | Kept) -> list[str]:
        """Add bytes to store; after `run`, the returned list has the keys of their chunks.

        Raises
        ------
        StoreError
            ``missing`` if chunks of an earlier snapshot are gone, or have another length.
        """
        if isinstance(content, Kept):
            earlier = content.manifest
            keys = earlier.blobs[content.name].chunks
            if earlier.chunk_bytes != self._chunk_bytes or not self._take_over(earlier, keys):
                raise StoreError(f"{earlier.label.name} is not there as it was stored.", "missing")
            self._total += len(content)
            self._done += len(content)
            return list(keys)
        if isinstance(content, Part):
            return self._add(_from_file(content.fd), content.offset, content.count)

        def fill(view: memoryview, offset: int) -> None:
            view[:] = content[offset : offset + len(view)]

        return self._add(fill, 0, len(content))

    def add_extents(
        self, fd: int, extents: Sequence[Extent], previous: Manifest | None
    ) -> list[list[str]]:
        """Add ranges of a file to store; after `run`, the lists have the keys of their chunks.

        Ranges that are also in `previous` are not read; their chunks are reused.
        """
        known: dict[Extent, tuple[str, ...]] = {}
        if previous is not None and previous.chunk_bytes == self._chunk_bytes:
            known = dict(zip(previous.extents, previous.extent_chunks, strict=True))
        found = []
        for extent in extents:
            keys = known.get(extent)
            if previous is not None and keys is not None and self._take_over(previous, keys):
                self._total += extent.count
                self._done += extent.count
                found.append(list(keys))
            else:
                found.append(self._add(_from_file(fd), extent.offset, extent.count))
        return found

    def _add(self, fill: Callable[[memoryview, int], None], offset: int, count: int) -> list[str]:
        pieces = cut(count, self._chunk_bytes)
        keys = [""] * len(pieces)
        for number, (at, length) in enumerate(pieces):
            self._pieces.append(_ChunkWrite(fill, offset + at, length, keys, number))
        self._total += count
        return keys

    def _take_over(self, previous: Manifest, keys: Sequence[str]) -> bool:
        """Reuse chunks of an earlier snapshot; return False if one is missing."""
        if not all(self._files.has(key, previous.chunks[key].stored) for key in keys):
            return False
        for key in keys:
            if key not in self._named:  # it was deleted and stored again by another job
                self._unsynced.add(key[:2])
            self._note(key, previous.chunks[key])
        return True

    def run(self, threads: int, cancel: Cancel) -> None:
        """Store everything that was added; then the chunks survive a loss of power."""
        pieces = iter(self._pieces)
        self._report(0)

        with self._buffer_pool.lend(self._chunk_bytes) as take_buffer:

            def begin() -> Callable[[], bool]:
                buffer = take_buffer()

                def step() -> bool:
                    with self._lock:
                        piece = next(pieces, None)
                    if piece is not None:
                        self._store(buffer, piece)
                    return piece is not None

                return step

            work_together(max(1, min(threads, len(self._pieces))), begin, cancel)
        self._sync(cancel)

    def _store(self, buffer: ChunkBuffer, piece: _ChunkWrite) -> None:
        content = buffer.content(piece.count)
        piece.fill(content, piece.offset)
        key = hash_of(content)
        if key not in self.chunks:
            stored = self._keep(buffer, key, piece.count)
            with self._lock:
                self._note(key, Size(piece.count, stored))
        piece.keys[piece.number] = key
        with self._lock:
            self._report(piece.count)

    def _keep(self, buffer: ChunkBuffer, key: str, count: int) -> int:
        """Ensure that the content of a buffer is stored; return the length of its file."""
        stored = self._named.get(key)
        if stored is not None and self._files.has(key, stored):
            return stored
        # Another process that stores the same chunk may be killed before its sync.
        self._unsynced.add(key[:2])
        found = self._files.find(key, count)
        return self._files.write(buffer, key, count) if found is None else found

    def _note(self, key: str, size: Size) -> None:
        if key not in self.chunks:
            self.chunks[key] = size
            self._allowance.charge(size.stored, key)

    def _report(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _sync(self, cancel: Cancel) -> None:
        """Sync directories in parallel: one flush of the disk serves several of them."""
        paths = [self._files.chunks / prefix for prefix in self._unsynced]
        if not paths:
            return
        paths.append(self._files.chunks)
        waiting = iter(paths)

        def step() -> bool:
            with self._lock:
                path = next(waiting, None)
            if path is not None:
                sync_directory(path)
            return path is not None

        work_together(min(_DIRECTORY_THREADS, len(paths)), lambda: step, cancel)
