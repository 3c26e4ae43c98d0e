"""The chunk store: snapshots on disk, every distinct piece of their bytes once.

    <root>/chunks/<2 digits>/<hash>         pieces, named by what is in them
    <root>/manifests/<owner>/<name>.json    what each snapshot consists of
    <root>/tmp                              what is being written
    <root>/lock                             shared by who stores or reads, held alone to collect
    <root>/publish                          held alone from the look at the quota to the rename

All methods may be called from any thread and from several processes, and block: an event loop
calls them in an executor. docs/format.md describes the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from kernelproxy.common.errors import InternalError, StoreError
from kernelproxy.storage.chunk_file import ChunkFiles, Desks, store_errors, sync_directory
from kernelproxy.storage.gc import Collected, collect
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
from kernelproxy.storage.quota import Allowance, Ledger, Limits, Sizes
from kernelproxy.storage.reader import Getting
from kernelproxy.storage.threads import Cancel, file_lock
from kernelproxy.storage.writer import Kept, Part, Progress, Putting

CHUNK_BYTES = 4 << 20


class Store:
    """A directory with stored snapshots.

    Parameters
    ----------
    root : Path
        The directory; created, for its owner alone, if missing.
    limits : Limits
        What the store and each payer may use. It counts what manifests name; until the next
        `collect` the disk may hold more.
    beside : callable, optional
        Bytes of what is not in the store and counts against its limit, too.
    chunk_bytes : int
        Length of a chunk. Smaller ones find more equal content and cost a file each.
    threads, get_threads : int
        How many a `put` or `get` uses. Of those that read, one writes, one in three verifies, and
        the others keep the disk busy. Memory for at most eight chunks is kept between jobs.
    lock_seconds : float
        How long to wait for a collection by somebody else.

    Raises
    ------
    StoreError
        If the directory cannot be made or used.
    """

    def __init__(
        self,
        root: Path,
        *,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
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
        self._files, self._desks, self._shelf = ChunkFiles(root), Desks(), Shelf(root)
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
        """Store a snapshot, in the place of one with the same owner and name if there is one.

        When this returns it survives a loss of power; when it raises, nothing has changed.

        Parameters
        ----------
        label : Label
            What it is.
        fd : int
            File whose ranges are stored; their bytes must not change meanwhile.
        extents : iterable of Range
            The ranges; they will be read back in this order.
        blobs : dict of str to bytes, Part or Kept, optional
            Named byte strings, in memory, in files, or in earlier snapshots.
        previous : Manifest, optional
            An earlier snapshot of the same session. Ranges with the offset, count and version that
            they had then are not read again.
        progress : callable, optional
            Called with the bytes done and the bytes in total, by any thread, one at a time.
        cancel : Cancel, optional
            Ends it early.

        Returns
        -------
        Manifest
            What was published.

        Raises
        ------
        StoreError
            ``full``, ``quota``, ``permission``, ``busy``, ``cancelled``, ``name`` or ``failed``;
            ``missing`` if what was to be kept of an earlier snapshot is not there.
        """
        cancel = cancel or Cancel()
        try:
            with store_errors(f"store {label.name}"), self._lock(shared=True, cancel=cancel):
                wanted = [Extent(each.offset, each.count, each.version) for each in extents]
                return self._put(label, fd, wanted, blobs or {}, previous, progress, cancel)
        except BaseException:
            # Chunks without a manifest are of no use, and there may be no room for them.
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
        named = Ledger(self._shelf.entries()).chunks
        putting = Putting(
            self._files, self._desks, named, self._allowance(label), self._chunk_bytes, progress
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
            # Again, with what others have published meanwhile.
            allowance = self._allowance(label)
            for key, size in manifest.chunks.items():
                allowance.charge(size.stored, key)
            allowance.charge(len(raw))
            cancel.check()
            self._shelf.publish(place, raw)
        return manifest

    def _allowance(self, label: Label) -> Allowance:
        """What may be added by who pays for a snapshot, if they give back the one in its place."""
        entries = () if self.limits == Limits() else self._shelf.entries()
        others = (e for e in entries if (e.owner, e.name) != (label.owner, label.name))
        beside = self._beside() if self.limits.store is not None else 0
        return Allowance(Ledger(others), label.payer, self.limits, beside)

    # ---------------------------------------------------------------- reading

    def load(self, owner: str, name: str, *, torch: str | None = None) -> Manifest:
        """Find a stored snapshot.

        Parameters
        ----------
        owner, name : str
            See `Label`.
        torch : str, optional
            The version that is to use it.

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
        """Read all extents into a file, each at its offset, and verify every byte.

        Parameters
        ----------
        manifest : Manifest
            From `load` or `put`.
        fd : int
            The file. After an error, extents that were not reported may hold anything.
        on_extent : callable, optional
            Called with the number of each extent that is there, by any thread, one at a time.
        next_wanted : callable, optional
            Asked before each chunk, by any thread, one at a time: the number of the extent to go
            on with, or None. One of which everything has been begun is as good as None.
        progress : callable, optional
            Called with the bytes of each chunk that is there, by any thread, one at a time.
        cancel : Cancel, optional
            Ends it early.

        Raises
        ------
        StoreError
            ``missing``, ``damaged``, ``permission``, ``busy``, ``cancelled`` or ``failed``.
        """
        cancel = cancel or Cancel()
        getting = Getting(self._files, self._desks, manifest, fd, on_extent, next_wanted, progress)
        name = manifest.label.name
        with store_errors(f"read {name}"), self._lock(shared=True, cancel=cancel):
            getting.run(self._get_threads, cancel)

    def blob(self, manifest: Manifest, name: str) -> bytes:
        """Read a named byte string, and verify it.

        Raises
        ------
        KeyError
            If the manifest has none of that name.
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
        """Write named byte strings to a file, one behind the other, and verify them.

        Parameters
        ----------
        manifest : Manifest
        names : sequence of str
        fd : int
            Written from where it stands.
        progress : callable, optional
            Called with the bytes of each chunk that is there.
        cancel : Cancel, optional
            Ends it early.

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
            self._desks.lend(manifest.chunk_bytes) as take_desk,
        ):
            desk = take_desk()
            for name in names:
                for key in manifest.blobs[name].chunks:
                    cancel.check()
                    take(name, self._files.read(desk, key, manifest.chunks[key]))

    # ---------------------------------------------------------------- keeping house

    def names(self) -> list[tuple[str, str]]:
        """Owner and name of everything that is stored, readable or not."""
        with store_errors(f"list the store {self.root}"):
            return [(entry.owner, entry.name) for entry in self._shelf.entries()]

    def delete(self, owner: str, name: str) -> None:
        """Forget a stored snapshot for good; `collect` gives back its space.

        Raises
        ------
        StoreError
            ``unknown``, ``permission``, ``name`` or ``failed``.
        """
        with store_errors(f"delete {name}"):
            self._shelf.delete(owner, name)

    def usage(self, payer: str | None = None) -> int:
        """Bytes that somebody pays for, or that the whole store uses: each distinct chunk once."""
        with store_errors(f"list the store {self.root}"):
            return Ledger(self._shelf.entries()).usage(payer)

    def sizes(self, owner: str, name: str) -> Sizes:
        """Bytes of a stored snapshot.

        Raises
        ------
        StoreError
            As `load`.
        """
        with store_errors(f"read {name}"):
            manifest = self._shelf.load(owner, name)
            entries = list(self._shelf.entries())
        return Ledger(entries).sizes(manifest, len(encode(manifest)))

    def collect(self) -> Collected:
        """Remove what no manifest names.

        Raises
        ------
        StoreError
            ``busy`` at once if somebody stores, reads or collects; ``damaged`` or ``newer`` if a
            manifest cannot be read, and then nothing is removed; ``permission``, ``failed``.
        """
        with store_errors(f"collect in {self.root}"), self._lock(shared=False, cancel=Cancel()):
            return collect(self._files, self._shelf)

    def _lock(self, *, shared: bool, cancel: Cancel) -> AbstractContextManager[None]:
        seconds = self._lock_seconds if shared else 0.0
        return file_lock(self.root / "lock", shared=shared, seconds=seconds, cancel=cancel)

    def _publish_lock(self, cancel: Cancel) -> AbstractContextManager[None]:
        if self.limits == Limits():
            return nullcontext()
        path, seconds = self.root / "publish", self._lock_seconds
        return file_lock(path, shared=False, seconds=seconds, cancel=cancel)
