"""Reading a checkpoint from the chunk store; it blocks, and is called in a thread."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from kernelproxy.agent.checkpoint.parts import (
    FILE_CONTENT,
    HOST_PART,
    SMALL_STORAGES,
    contents_of,
)
from kernelproxy.agent.checkpoint.progress import Note
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Manifest

_READ_ONLY = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def read_checkpoint(
    store: ChunkStore, manifest: Manifest, progress: Note, *, process: bool
) -> tuple[list[int], list[list[int]], list[int]]:
    """Read and verify a checkpoint.

    Parameters
    ----------
    store : ChunkStore
    manifest : Manifest
    progress : callable
        Called with the bytes read and in total.
    process : bool
        True if its process will be restored: then only its files are read.

    Returns
    -------
    tuple
        The lengths of the parts of the host state; number, offset and bytes of each device storage;
        and read-only descriptors of the host state, the storages and the contents of files.

    Raises
    ------
    StoreError
        See `ChunkStore.get`.
    """
    meta, count = manifest.label.meta, 0
    host = [f"{HOST_PART}-{index}" for index in range(0 if process else meta["parts"])]
    held = [f"{FILE_CONTENT}-{index}" for index in range(len(contents_of(meta["files"])))]
    numbers = [] if process else meta["storages"]
    wanted = _only(manifest, numbers)
    total = sum(manifest.blobs[each].count for each in (*host, *held))
    total += sum(extent.count for extent in wanted.extents)
    progress(0, total)

    def read(done: int) -> None:
        nonlocal count
        count += done
        progress(count, total)

    end = max((each.offset + each.count for each in wanted.extents), default=0)
    fds: list[int] = []
    try:
        _make_files(store, fds)
        parts = store.write_blobs(manifest, host, fds[0], progress=read)
        store.write_blobs(manifest, held, fds[2], progress=read)
        os.ftruncate(fds[1], end)
        store.get(wanted, fds[1], progress=read)
        os.pwrite(fds[1], store.blob(manifest, SMALL_STORAGES), end)
        _make_read_only(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return parts, [] if process else _places(wanted, numbers, end), fds


def _make_files(store: ChunkStore, fds: list[int]) -> None:
    """Make the files of a checkpoint; append their descriptors, so that the caller closes them."""
    for part in ("host", "device"):
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fds.append(os.memfd_create(f"sing-checkpoint-{part}", flags))
    with tempfile.TemporaryFile(dir=store.root / "tmp") as files:
        fds.append(os.dup(files.fileno()))


def _make_read_only(fds: list[int]) -> None:
    """Replace descriptors of a checkpoint's files by read-only ones.

    Others share the files, and what they wrote would take our memory and disk.
    """
    for fd in fds[:2]:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _READ_ONLY)
    for index, fd in enumerate(fds):
        fds[index] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)


def _places(wanted: Manifest, numbers: Sequence[int], end: int) -> list[list[int]]:
    """Return number, offset and bytes of each storage; the small ones are behind the others."""
    places = [
        [number, each.offset, each.count]
        for number, each in zip(numbers, wanted.extents, strict=True)
    ]
    for number, count in wanted.label.meta["small"]:
        places.append([number, end, count])
        end += count
    return places


def _only(manifest: Manifest, storages: Sequence[int]) -> Manifest:
    """Return a checkpoint with the extents of some storages only, in their order."""
    numbers = manifest.label.meta.get("extents", storages)
    places = {number: place for place, number in enumerate(numbers)}
    kept = [places[number] for number in storages]
    return replace(
        manifest,
        extents=tuple(manifest.extents[place] for place in kept),
        extent_chunks=tuple(manifest.extent_chunks[place] for place in kept),
    )
