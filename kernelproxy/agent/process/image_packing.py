"""The images of a process in a checkpoint: stored whole once, and later only what has changed.

All files of a process form one sequence of pages: first the small ones, packed, then each of the
others. The first checkpoint of a session stores the sequence as *base*; the next ones name the same
chunks and add a delta (`kernelproxy.storage.page_delta`), until the delta has grown so much that a
new base is better.
| blob             | what it is                                                               |
|------------------|--------------------------------------------------------------------------|
| `process-base-N` | a part of the base                                                       |
| `process-delta`  | pages of the delta                                                       |
| `process-index`  | JSON: `files` (name and bytes, in the order of the sequence), `parts`    |
|                  | (of the base), `runs`; see `page_delta`                                  |
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernelproxy.common.errors import StoreError
from kernelproxy.common.untrusted import parse_json
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Manifest
from kernelproxy.storage.page_delta import PAGE_BYTES, Bytes, Delta, Run, apply, pages
from kernelproxy.storage.writer import Kept, Part

INDEX = "process-index"
_BASE, _DELTA = "process-base-{}", "process-delta"
#: Files below this size share a blob: each would take a block of its own.
_SMALL_BYTES = 1 << 20
#: A new base is made if a delta would have more than one in `_DELTA_PART` of the pages (or
#: `_DELTA_PAGES_MIN`), or would use less than one in `_BASE_PART` of the base's pages.
_DELTA_PART, _BASE_PART, _DELTA_PAGES_MIN = 4, 2, 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

Blobs = dict[str, bytes | Part | Kept]


@dataclass(frozen=True)
class _Index:
    """Content of `process-index`."""

    files: list[tuple[str, int]]
    parts: int
    runs: list[Run]

    def encode(self) -> bytes:
        return json.dumps({"files": self.files, "parts": self.parts, "runs": self.runs}).encode()

    @classmethod
    def read(cls, store: ChunkStore, manifest: Manifest) -> _Index:
        try:
            raw: Any = parse_json(store.blob(manifest, INDEX))
            index = cls(
                [(str(name), int(size)) for name, size in raw["files"]],
                int(raw["parts"]),
                [[int(number) for number in run] for run in raw["runs"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(manifest, repr(error)) from error
        named = all(_NAME.fullmatch(name) for name, _ in index.files)
        if not named or any(len(run) != 3 for run in index.runs):
            raise _damaged(manifest, "a name or a run is none")
        return index


def _damaged(manifest: Manifest, how: str) -> StoreError:
    return StoreError(f"The process in {manifest.label.name} is damaged: {how}.", "damaged")


def holds_process(manifest: Manifest) -> bool:
    """Return True if a checkpoint contains a process."""
    return INDEX in manifest.blobs


class PackedImages:
    """The images in a directory, to be stored. Owns descriptors until `close`.

    Parameters
    ----------
    directory : Path
        Written by CRIU; its logs are left out.
    """

    def __init__(self, directory: Path) -> None:
        self._stack = contextlib.ExitStack()
        paths = sorted(path for path in directory.iterdir() if path.suffix != ".log")
        sized = [(path, path.stat().st_size) for path in paths]
        small = [each for each in sized if each[1] < _SMALL_BYTES]
        large = [each for each in sized if each[1] >= _SMALL_BYTES]
        self._files = [(path.name, size) for path, size in [*small, *large]]
        packed = b"".join(_padded(path.read_bytes()) for path, _ in small)
        self._contents: list[Bytes] = [packed]
        self._stored: list[bytes | Part] = [packed]
        for path, size in large:
            file = self._stack.enter_context(path.open("rb"))
            self._contents.append(self._stack.enter_context(_mapped(file)))
            self._stored.append(Part(file.fileno(), 0, size))

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def whole(self) -> Blobs:
        """Return the blobs of a checkpoint with all pages as base."""
        count = sum(pages(len(each)) for each in self._contents)
        index = _Index(self._files, len(self._stored), [[count, 0, -1]])
        bases = {_BASE.format(number): each for number, each in enumerate(self._stored)}
        return {**bases, INDEX: index.encode()}

    def work(self, previous: Manifest | None) -> int:
        """Return the bytes that `blobs` reads to compare them."""
        if previous is None or not holds_process(previous):
            return 0
        named = re.compile(_BASE.format(r"\d+"))
        base = sum(blob.count for name, blob in previous.blobs.items() if named.fullmatch(name))
        return base + self.image_bytes

    @property
    def image_bytes(self) -> int:
        """Number of bytes of the images."""
        return sum(len(each) for each in self._contents)

    def blobs(
        self, store: ChunkStore, previous: Manifest | None, progress: Callable[[int], object]
    ) -> Blobs:
        """Return the blobs of a checkpoint, as a delta to an earlier one if that is worthwhile.

        Parameters
        ----------
        store : Store
        previous : Manifest or None
            The earlier one.
        progress : callable
            Called with the bytes that have been compared, or read for that; `work` in all, unless
            the comparison ends early because a new base is better.
        """
        if previous is None or not holds_process(previous):
            return self.whole()
        try:
            older = _Index.read(store, previous)
            base = self._stack.enter_context(_base(store, previous, older.parts, progress))
        except StoreError:
            return self.whole()
        spool = self._stack.enter_context(_temporary(store))
        total = sum(pages(len(each)) for each in self._contents)
        limit = max(total // _DELTA_PART, _DELTA_PAGES_MIN)
        delta = Delta(base, spool.write, limit, progress)
        if not all(delta.add(each) for each in self._contents):
            return self.whole()
        if _BASE_PART * sum(n for n, at, _ in delta.runs if at >= 0) < pages(len(base)):
            return self.whole()
        spool.flush()
        names = [_BASE.format(number) for number in range(older.parts)]
        index = _Index(self._files, older.parts, delta.runs)
        kept: Blobs = {name: Kept(previous, name) for name in names}
        added: Blobs = {_DELTA: Part(spool.fileno(), 0, spool.tell()), INDEX: index.encode()}
        return kept | added


def unpack(
    store: ChunkStore, manifest: Manifest, directory: Path, progress: Callable[[int, int], object]
) -> None:
    """Write the images of a checkpoint into an empty directory.

    Parameters
    ----------
    store : Store
    manifest : Manifest
    directory : Path
    progress : callable
            Called with the bytes done and in total: those that are read, and those that are
            written.

    Raises
    ------
    StoreError
        As `ChunkStore.get`.
    OSError
        If they cannot be written.
    """
    index = _Index.read(store, manifest)
    names = [*(_BASE.format(number) for number in range(index.parts)), _DELTA]
    done = 0
    total = sum(manifest.blobs[name].count for name in names if name in manifest.blobs)
    total += sum(pages(size) * PAGE_BYTES for _, size in index.files)

    def note(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    def made(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            note(len(piece))
            yield piece

    note(0)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(_base(store, manifest, index.parts, note))
        delta: Bytes = b""
        if _DELTA in manifest.blobs:
            delta = stack.enter_context(_blobs(store, manifest, [_DELTA], note))
        try:
            _write(directory, index.files, made(apply(index.runs, base, delta)))
        except ValueError as error:
            raise _damaged(manifest, str(error)) from error


def _write(directory: Path, files: Iterable[tuple[str, int]], pieces: Iterator[bytes]) -> None:
    """Cut a sequence of pages into files."""
    left = b""
    for name, size in files:
        fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            rest = pages(size) * PAGE_BYTES
            while rest:
                left = left or next(pieces, b"")
                if not left:
                    raise ValueError("it is too short")
                step = left[:rest]
                left, rest = left[len(step) :], rest - len(step)
                file.write(step)
            file.truncate(size)


def _base(
    store: ChunkStore, manifest: Manifest, parts: int, note: Callable[[int], object]
) -> contextlib.AbstractContextManager[Bytes]:
    return _blobs(store, manifest, [_BASE.format(number) for number in range(parts)], note)


@contextlib.contextmanager
def _blobs(
    store: ChunkStore, manifest: Manifest, names: Iterable[str], note: Callable[[int], object]
) -> Iterator[Bytes]:
    """Read blobs into one mapping, each padded to whole pages, and verify them."""
    with _temporary(store) as file:
        for name in names:
            if name not in manifest.blobs:
                raise _damaged(manifest, f"it has no {name}")
            store.write_blobs(manifest, [name], file.fileno(), progress=note)
            end = os.lseek(file.fileno(), 0, os.SEEK_CUR)
            os.ftruncate(file.fileno(), pages(end) * PAGE_BYTES)
            os.lseek(file.fileno(), 0, os.SEEK_END)
        with _mapped(file) as mapping:
            yield mapping


@contextlib.contextmanager
def _mapped(file: IO[bytes]) -> Iterator[Bytes]:
    if not os.fstat(file.fileno()).st_size:
        yield b""
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        yield mapping


def _temporary(store: ChunkStore) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=store.root / "tmp")


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % PAGE_BYTES)
