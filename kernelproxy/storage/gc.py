"""Garbage collection of chunks that no manifest names.

| moment of a kill -9                  | what the next collection finds                         |
|--------------------------------------|--------------------------------------------------------|
| while a chunk is written             | a temporary file: removed                              |
| after that, before the manifest      | unreferenced chunks: removed                           |
| while the manifest is published      | the old one or the new one, complete                   |
| after a manifest was deleted         | unreferenced chunks: removed                           |
| between two chunks of a collection   | the rest, still unreferenced: removed                  |

It holds the store's lock exclusively, while storing and reading share it. So no job can begin to
reuse a chunk between the scan of the manifests and the removal.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from kernelproxy.common.errors import StoreError
from kernelproxy.storage.chunk_file import DAMAGED, ChunkFiles
from kernelproxy.storage.manifest import decode
from kernelproxy.storage.manifest_store import Shelf

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RemovedFiles:
    """Number and total bytes of the files that a collection removed."""

    files: int
    bytes: int


def collect(files: ChunkFiles, shelf: Shelf) -> RemovedFiles:
    """Remove temporary files and unreferenced chunks; the caller holds the lock exclusively.

    Raises
    ------
    StoreError
        If a manifest cannot be read; then nothing was removed, because its chunks are unknown.
    """
    named = _named(shelf)
    # First make earlier deletions of manifests durable: a loss of power must not undo them after
    # their chunks are gone.
    shelf.sync()
    count = total = 0
    for path in _garbage(files, named):
        total += os.stat(path).st_size
        os.unlink(path)
        count += 1
    return RemovedFiles(count, total)


def _named(shelf: Shelf) -> set[str]:
    named: set[str] = set()
    for path in shelf.files():
        try:
            named |= decode(path.read_bytes(), str(path)).chunks.keys()
        except FileNotFoundError:
            continue  # deleted in the meantime, or a temporary name that is gone
        except StoreError as error:
            raise StoreError(
                f"Nothing was collected, for it is not known what this one needs: {error}",
                error.reason,
            ) from error
    return named


def _garbage(files: ChunkFiles, named: set[str]) -> list[str]:
    with os.scandir(files.temporary) as entries:
        found = [entry.path for entry in entries]
    for directory in files.chunks.iterdir():
        present = os.listdir(directory)
        for name in present:
            key = name.removesuffix(DAMAGED)
            # A damaged chunk is kept while there is no intact copy, so that a user can examine it.
            needed = key in named and (name == key or key not in present)
            if _KEY.fullmatch(key) and not needed:
                found.append(str(directory / name))
    return found
