"""The chunk store: snapshots on disk, with every distinct chunk of their bytes stored once.

    <root>/chunks/<2 digits>/<hash>         chunks, named by the hash of their content
    <root>/manifests/<owner>/<name>.json    the chunks of each snapshot
    <root>/tmp                              files that are being written
    <root>/lock                             shared to store or read, exclusive to collect
    <root>/publish                          exclusive from the check of the quota to the rename

All methods may be called from any thread and from several processes. They block: an event loop
calls them in an executor. docs/format.md describes the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from kernelproxy.common.errors import InternalError, StoreError
from kernelproxy.storage.chunk_file import BufferPool, ChunkFiles, store_errors, sync_directory
from kernelproxy.storage.gc import RemovedFiles, collect
from kernelproxy.storage.manifest import (
    CHUNK_BYTES_MAX,
    Blob,
    Extent,
    Label,
    Manifest,
    Range,
    encode,
)
from kernelproxy.storage.manifest_store import Shelf
from kernelproxy.storage.quota import ChunkUsage, RemainingQuota, Sizes, StoreLimits
from kernelproxy.storage.reader import SnapshotRead
from kernelproxy.storage.threads import Cancel, file_lock
from kernelproxy.storage.writer import Kept, Part, Progress, Putting

CHUNK_BYTES = 4 << 20


class ChunkStore:
    """A directory with stored snapshots.

    Parameters
    ----------
    root : Path
        The directory. If it is missing, it is created with access for its owner only.
    limits : Limits
        Limits of the store and of each payer. Only chunks that manifests name count; until the next
        `collect` the disk may hold more.
    beside : callable, optional
        Returns bytes outside of the store that also count against its limit.
    chunk_bytes : int
        Length of a chunk. Smaller chunks find more equal content, but each needs a file.
    threads, get_threads : int
        Number of threads of a `put` or `get`. Of those of a `get`, one writes, one in three
        verifies, and the others read, to keep the disk busy. Memory for at most eight chunks is
        kept between jobs.
    lock_seconds : float
        How long to wait for a collection by another process or thread.

    Raises
    ------
    StoreError
        If the directory cannot be created or used.
    """

    def __init__(
        self,
        root: Path,
        *,
        limits: StoreLimits = StoreLimits(),  # noqa: B008 (frozen)
        beside: Callable[[], int] = lambda: 0,
        chunk_bytes: int = CHUNK_BYTES,
        threads: int = 4,
        get_threads: int = 4,
        lock_seconds: float = 60.0,
    ) -> None:
        if not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
            raise InternalError(f"chunks of {chunk_bytes} bytes")
        self.root, self.limits, self._beside = root, limits, beside
        self._chunk_bytes, self._lock_seconds = chunk_bytes, lock_seconds
        self._threads, self._get_threads = threads, get_threads
        self._files, self._buffer_pool, self._shelf = ChunkFiles(root), BufferPool(), Shelf(root)
        with store_errors(f"use the store {root}"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for directory in (self._files.chunks, self._files.temporary, self._shelf.directory):
                directory.mkdir(mode=0o700, exist_ok=True)
            sync_directory(root)

    # ---------------------------------------------------------------- storing

    def put(
        self,
        label: Label,
        fd: int,
        extents: Iterable[Range],
        *,
        blobs: Mapping[str, bytes | Part | Kept] | None = None,
        previous: Manifest | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Manifest:
        """Store a snapshot; it replaces one with the same owner and name.

        When this returns, the snapshot survives a loss of power. If it raises, nothing has changed.

        Parameters
        ----------
        label : Label
            Description of the snapshot.
        fd : int
            File whose ranges are stored; their bytes must not change in the meantime.
        extents : iterable of Range
            The ranges; they will be read back in this order.
        blobs : dict of str to bytes, Part or Kept, optional
            Named byte strings, in memory, in files, or in earlier snapshots.
        previous : Manifest, optional
            An earlier snapshot of the same session. Ranges with the same offset, count and version
            as in it are not read again.
        progress : callable, optional
            Called with the bytes done and the bytes in total, by any thread, one call at a time.
        cancel : Cancel, optional
            Cancels the job.

        Returns
        -------
        Manifest
            The published manifest.

        Raises
        ------
        StoreError
            ``full``, ``quota``, ``permission``, ``busy``, ``cancelled``, ``name`` or ``failed``;
            ``missing`` if a blob of an earlier snapshot (`Kept`) no longer exists.
        """
        cancel = cancel or Cancel()
        try:
            with store_errors(f"store {label.name}"), self._lock(shared=True, cancel=cancel):
                wanted = [Extent(each.offset, each.count, each.version) for each in extents]
                return self._put(label, fd, wanted, blobs or {}, previous, progress, cancel)
        except BaseException:
            # Chunks without a manifest are useless, and the disk may be full.
            with suppress(StoreError):
                self.collect()
            raise

    def _put(
        self,
        label: Label,
        fd: int,
        extents: Sequence[Extent],
        blobs: Mapping[str, bytes | Part | Kept],
        previous: Manifest | None,
        progress: Progress | None,
        cancel: Cancel,
    ) -> Manifest:
        place = self._shelf.path(label.owner, label.name)
        named = ChunkUsage(self._shelf.entries()).chunks
        putting = Putting(
            self._files,
            self._buffer_pool,
            named,
            self._allowance(label),
            self._chunk_bytes,
            progress,
        )
        blob_keys = {name: putting.add_blob(content) for name, content in blobs.items()}
        extent_keys = putting.add_extents(fd, extents, previous)
        putting.run(self._threads, cancel)
        manifest = Manifest(
            label=label,
            created=time.time(),
            chunk_bytes=self._chunk_bytes,
            chunks=putting.chunks,
            blobs={name: Blob(len(blobs[name]), tuple(keys)) for name, keys in blob_keys.items()},
            extents=tuple(extents),
            extent_chunks=tuple(tuple(keys) for keys in extent_keys),
        )
        raw = encode(manifest)
        with self._publish_lock(cancel):
            # Check again, including manifests that others have published in the meantime.
            allowance = self._allowance(label)
            for key, size in manifest.chunks.items():
                allowance.charge(size.stored, key)
            allowance.charge(len(raw))
            cancel.check()
            self._shelf.publish(place, raw)
        return manifest

    def _allowance(self, label: Label) -> RemainingQuota:
        """Return the allowance of a snapshot's payer, not counting the one that it replaces."""
        entries = () if self.limits == StoreLimits() else self._shelf.entries()
        others = (e for e in entries if (e.owner, e.name) != (label.owner, label.name))
        beside = self._beside() if self.limits.store is not None else 0
        return RemainingQuota(ChunkUsage(others), label.payer, self.limits, beside)

    # ---------------------------------------------------------------- reading

    def load(self, owner: str, name: str, *, torch: str | None = None) -> Manifest:
        """Return the manifest of a stored snapshot.

        Parameters
        ----------
        owner, name : str
            See `Label`.
        torch : str, optional
            Torch version that will use it; must be the one that wrote it.

        Raises
        ------
        StoreError
            ``unknown``, ``damaged``, ``newer``, ``torch``, ``permission`` or ``name``.
        """
        with store_errors(f"read {name}"):
            manifest = self._shelf.load(owner, name)
        written = manifest.label.torch
        if torch is not None and torch != written:
            raise StoreError(
                f"{name} was stored by torch {written} and cannot be used by torch {torch}: "
                f"start its kernel in an environment with torch {written}.",
                "torch",
            )
        return manifest

    def get(
        self,
        manifest: Manifest,
        fd: int,
        *,
        on_extent: Callable[[int], object] | None = None,
        next_wanted: Callable[[], int | None] | None = None,
        progress: Callable[[int], object] | None = None,
        cancel: Cancel | None = None,
    ) -> None:
        """Read all extents into a file, each at its offset, and verify all bytes.

        Parameters
        ----------
        manifest : Manifest
            From `load` or `put`.
        fd : int
            The file. After an error, the content of extents that were not reported is undefined.
        on_extent : callable, optional
            Called with the number of each complete extent, by any thread, one call at a time.
        next_wanted : callable, optional
            Called before each chunk, by any thread, one call at a time. Returns the number of the
            extent to continue with, or None. An extent whose chunks have all begun counts as None.
        progress : callable, optional
            Called with the bytes of each chunk that was read, by any thread, one call at a time.
        cancel : Cancel, optional
            Cancels the job.

        Raises
        ------
        StoreError
            ``missing``, ``damaged``, ``permission``, ``busy``, ``cancelled`` or ``failed``.
        """
        cancel = cancel or Cancel()
        getting = SnapshotRead(
            self._files, self._buffer_pool, manifest, fd, on_extent, next_wanted, progress
        )
        name = manifest.label.name
        with store_errors(f"read {name}"), self._lock(shared=True, cancel=cancel):
            getting.run(self._get_threads, cancel)

    def blob(self, manifest: Manifest, name: str) -> bytes:
        """Read a named byte string, and verify it.

        Raises
        ------
        KeyError
            If the manifest has no blob of that name.
        StoreError
            As `get`.
        """
        content = bytearray()
        self._read_blobs(manifest, [name], lambda _, piece: content.extend(piece), Cancel())
        return bytes(content)

    def write_blobs(
        self,
        manifest: Manifest,
        names: Sequence[str],
        fd: int,
        *,
        progress: Callable[[int], object] | None = None,
        cancel: Cancel | None = None,
    ) -> list[int]:
        """Write named byte strings to a file, concatenated, and verify them.

        Parameters
        ----------
        manifest : Manifest
        names : sequence of str
        fd : int
            Written from its current position.
        progress : callable, optional
            Called with the bytes of each chunk that was written.
        cancel : Cancel, optional
            Cancels the job.

        Returns
        -------
        list of int
            Length of each.

        Raises
        ------
        KeyError, StoreError
            As `blob`; ``cancelled``.
        """

        def write(_: str, piece: memoryview) -> None:
            count = len(piece)
            while piece:
                piece = piece[os.write(fd, piece) :]
            if progress is not None:
                progress(count)

        self._read_blobs(manifest, names, write, cancel or Cancel())
        return [manifest.blobs[name].count for name in names]

    def _read_blobs(
        self,
        manifest: Manifest,
        names: Sequence[str],
        take: Callable[[str, memoryview], object],
        cancel: Cancel,
    ) -> None:
        with (
            store_errors(f"read {manifest.label.name}"),
            self._lock(shared=True, cancel=cancel),
            self._buffer_pool.lend(manifest.chunk_bytes) as take_buffer,
        ):
            buffer = take_buffer()
            for name in names:
                for key in manifest.blobs[name].chunks:
                    cancel.check()
                    take(name, self._files.read(buffer, key, manifest.chunks[key]))

    # ---------------------------------------------------------------- maintenance

    def names(self) -> list[tuple[str, str]]:
        """Return owner and name of all stored snapshots, also of unreadable ones."""
        with store_errors(f"list the store {self.root}"):
            return [(entry.owner, entry.name) for entry in self._shelf.entries()]

    def delete(self, owner: str, name: str) -> None:
        """Delete a stored snapshot for good; `collect` frees its space.

        Raises
        ------
        StoreError
            ``unknown``, ``permission``, ``name`` or ``failed``.
        """
        with store_errors(f"delete {name}"):
            self._shelf.delete(owner, name)

    def usage(self, payer: str | None = None) -> int:
        """Return the bytes of a payer, or of the whole store: each distinct chunk counts once."""
        with store_errors(f"list the store {self.root}"):
            return ChunkUsage(self._shelf.entries()).usage(payer)

    def sizes(self, owner: str, name: str) -> Sizes:
        """Return the sizes of a stored snapshot.

        Raises
        ------
        StoreError
            As `load`.
        """
        with store_errors(f"read {name}"):
            manifest = self._shelf.load(owner, name)
            entries = list(self._shelf.entries())
        return ChunkUsage(entries).sizes(manifest, len(encode(manifest)))

    def collect(self) -> RemovedFiles:
        """Remove chunks that no manifest names, and temporary files.

        Raises
        ------
        StoreError
            ``busy`` at once if another thread or process stores, reads or collects; ``damaged`` or
            ``newer`` if a manifest cannot be read, and then nothing is removed; ``permission``,
            ``failed``.
        """
        with store_errors(f"collect in {self.root}"), self._lock(shared=False, cancel=Cancel()):
            return collect(self._files, self._shelf)

    def _lock(self, *, shared: bool, cancel: Cancel) -> AbstractContextManager[None]:
        seconds = self._lock_seconds if shared else 0.0
        return file_lock(self.root / "lock", shared=shared, seconds=seconds, cancel=cancel)

    def _publish_lock(self, cancel: Cancel) -> AbstractContextManager[None]:
        if self.limits == StoreLimits():
            return nullcontext()
        path, seconds = self.root / "publish", self._lock_seconds
        return file_lock(path, shared=False, seconds=seconds, cancel=cancel)
