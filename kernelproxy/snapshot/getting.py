"""Reading the bytes of one stored snapshot, in an order that may change meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from kernelproxy.snapshot.chunks import ChunkFiles, Desk
from kernelproxy.snapshot.manifest import Manifest, cut
from kernelproxy.snapshot.together import Cancel, work_together


class Getting:
    """One manifest's extents on their way into a file; the caller holds the store's lock.

    Parameters
    ----------
    files : ChunkFiles
        Where chunks are.
    manifest : Manifest
        What is wanted.
    fd : int
        Where the extents go, each at its offset.
    on_extent, next_wanted, progress : callable, optional
        See `Store.get`.
    """

    def __init__(
        self,
        files: ChunkFiles,
        manifest: Manifest,
        fd: int,
        on_extent: Callable[[int], object] | None,
        next_wanted: Callable[[], int | None] | None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._files, self._manifest, self._fd = files, manifest, fd
        self._on_extent, self._next_wanted = on_extent, next_wanted
        self._progress = progress
        self._pieces = [
            iter(list(zip(cut(extent.count, manifest.chunk_bytes), keys, strict=True)))
            for extent, keys in zip(manifest.extents, manifest.extent_chunks, strict=True)
        ]
        self._left = [len(keys) for keys in manifest.extent_chunks]
        self._order: Iterator[int] = iter(range(len(self._pieces)))
        self._current: int | None = None
        self._lock = threading.Lock()
        # The system lets one thread write a file at a time: those who wait here do not spin.
        self._writing = threading.Lock()

    def run(self, threads: int, cancel: Cancel) -> None:
        """Read everything."""
        for index, left in enumerate(self._left):
            if not left:
                self._finished(index)

        def begin() -> Callable[[], bool]:
            desk = Desk(self._manifest.chunk_bytes)
            return lambda: self._step(desk)

        work_together(max(1, min(threads, sum(self._left))), begin, cancel)

    def _step(self, desk: Desk) -> bool:
        with self._lock:
            taken = self._take()
        if taken is None:
            return False
        index, offset, key = taken
        content = self._files.read(desk, key, self._manifest.chunks[key])
        done = 0
        with self._writing:
            while done < len(content):
                done += os.pwrite(self._fd, content[done:], offset + done)
        with self._lock:
            if self._progress is not None:
                self._progress(len(content))
            self._left[index] -= 1
            if not self._left[index]:
                self._finished(index)
        return True

    def _take(self) -> tuple[int, int, str] | None:
        """Next chunk: extent, offset in the file, key."""
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

    def _take_of(self, index: int) -> tuple[int, int, str] | None:
        piece = next(self._pieces[index], None)
        if piece is None:
            return None
        (at, _), key = piece
        return index, self._manifest.extents[index].offset + at, key

    def _finished(self, index: int) -> None:
        if self._on_extent is not None:
            self._on_extent(index)
