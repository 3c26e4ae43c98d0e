"""Removing the chunks that no manifest names.

| moment of a kill -9                  | what the next collection finds                         |
|--------------------------------------|--------------------------------------------------------|
| while a chunk is written             | a temporary file: removed                              |
| after that, before the manifest      | chunks that nothing names: removed                     |
| while the manifest is published      | the older one or the new one, whole                    |
| after a manifest was deleted         | chunks that nothing names: removed                     |
| between two chunks of a collection   | the rest, still unnamed: removed                       |

It holds the store's lock alone, and who stores or reads shares it: nobody can begin to rely on a
chunk between the look at the manifests and the removal.
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
class Collected:
    """Number and bytes of the files that a collection removed."""

    files: int
    bytes: int


def collect(files: ChunkFiles, shelf: Shelf) -> Collected:
    """Remove temporary files and chunks that no manifest names; the caller holds the lock alone.

    Raises
    ------
    StoreError
        If a manifest cannot be read; then nothing was removed, for its chunks are not known.
    """
    named = _named(shelf)
    # A deletion that is not yet on the disk must not be undone by a loss of power after this.
    shelf.sync()
    count = total = 0
    for path in _garbage(files, named):
        total += os.stat(path).st_size
        os.unlink(path)
        count += 1
    return Collected(count, total)


def _named(shelf: Shelf) -> set[str]:
    named: set[str] = set()
    for path in shelf.files():
        try:
            named |= decode(path.read_bytes(), str(path)).chunks.keys()
        except FileNotFoundError:
            continue  # deleted meanwhile, or a temporary name that is gone
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
            # A damaged chunk is kept as long as it is the only one, for a person to look at.
            needed = key in named and (name == key or key not in present)
            if _KEY.fullmatch(key) and not needed:
                found.append(str(directory / name))
    return found
