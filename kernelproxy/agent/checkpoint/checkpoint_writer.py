"""Writing a checkpoint to the chunk store; it blocks, and is called in a thread."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kernelproxy.agent.checkpoint.parts import (
    FILE_CONTENT,
    HOST_PART,
    SMALL_STORAGES,
    DeviceSide,
    HostState,
    ProcessSide,
)
from kernelproxy.agent.children.saved_child import PAGES
from kernelproxy.agent.process.image_packing import Blobs, PackedImages
from kernelproxy.agent.spill.spill_store import TABLES
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import StoreError
from kernelproxy.common.protocol.snapshot_tables import ArenaExtent, read_storages, read_tables
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Label, Manifest
from kernelproxy.storage.threads import Cancel
from kernelproxy.storage.writer import Part


class _Content(NamedTuple):
    """All that is stored of a checkpoint, except the images of its process."""

    label: Label
    extents: list[ArenaExtent]
    blobs: Blobs


def write_checkpoint(
    store: Callable[[], ChunkStore],
    label: Label,
    host: HostState,
    fds: Sequence[int],
    device: DeviceSide,
    process: ProcessSide | None,
    cancel: Cancel,
    progress: Callable[[int, int], object],
) -> Manifest:
    """Store a checkpoint; see `CheckpointCatalog.put`.

    Parameters
    ----------
    store : callable
        The chunk store; raises StoreError if it cannot be used.
    label : Label
        Description of the checkpoint; what is needed to read it is added.
    host : HostState
    fds : sequence of int
        Files of the parts of the host state, and of the contents of the notebook's files.
    device : DeviceSide
    process : ProcessSide or None
    cancel : Cancel
    progress : callable
        Called with the bytes done and in total, in any thread.
    """
    content = _content(label, host, fds, device, process)
    to_compare = 0

    def put(images: Blobs) -> Manifest:
        return store().put(
            content.label,
            device.arena_fd,
            content.extents,
            blobs={**content.blobs, **images},
            previous=device.previous,
            progress=lambda done, total: progress(to_compare + done, to_compare + total),
            cancel=cancel,
        )

    if process is None:
        return put({})
    with contextlib.closing(PackedImages(process.directory)) as packed:
        compared, to_compare = 0, packed.work(device.checkpoint)
        # The bytes to store after comparing; many of them may be stored already.
        rest = packed.image_bytes + sum(map(len, content.blobs.values()))
        rest += sum(each.count for each in content.extents)

        def compare(count: int) -> None:
            nonlocal compared
            compared += count
            cancel.check()
            progress(compared, to_compare + rest)

        images = packed.blobs(store(), device.checkpoint, compare)
        try:
            return put(images)
        except StoreError as error:
            # Meanwhile the checkpoint was deleted on which the images were to be based.
            if error.reason != "missing":
                raise
            return put(packed.whole())


def _content(
    label: Label,
    host: HostState,
    fds: Sequence[int],
    device: DeviceSide,
    process: ProcessSide | None,
) -> _Content:
    extents, small = _device_part(device.snapshot, list(host.storages))
    meta = {
        **label.meta,
        "storages": [each.id for each in extents],
        "small": [[number, len(data)] for number, data in small.items()],
        "parts": len(host.parts),
        "files": host.files,
    }
    blobs: Blobs = {
        **_blobs(HOST_PART, fds[0], host.parts),
        **_blobs(FILE_CONTENT, fds[1], host.contents),
        SMALL_STORAGES: b"".join(small.values()),
    }
    if process is not None:
        # All storages: only the process knows which of them it refers to.
        extents = _all_extents(device.snapshot)
        children = [each.described() for each in process.children]
        about = {**process.about, "children": children} if children else process.about
        meta = {**meta, "process": about, "extents": [each.id for each in extents]}
        blobs[PAGES] = process.pages
        if device.snapshot is not None:
            fd = device.snapshot.fd
            blobs[TABLES] = os.pread(fd, os.fstat(fd).st_size, 0)
        for number, child in enumerate(process.children):
            blobs.update(child.blobs(number))
    return _Content(replace(label, meta=meta), extents, blobs)


def _blobs(name: str, fd: int, counts: Sequence[int]) -> dict[str, bytes | Part]:
    """Name consecutive parts of a file as blobs."""
    ends = list(itertools.accumulate(counts))
    return {
        f"{name}-{index}": Part(fd, end - count, count)
        for index, (end, count) in enumerate(zip(ends, counts, strict=True))
    }


def _device_part(
    snapshot: Snapshot | None, wanted: Sequence[int]
) -> tuple[list[ArenaExtent], dict[int, bytes]]:
    """Return the storages of the host state: extents, and the bytes of small storages."""
    if snapshot is None or not wanted:
        if wanted:
            raise StoreError("The device has nothing of what the notebook refers to.", "damaged")
        return [], {}
    extents = {each.id: each for each in read_tables(snapshot.fd).extents}
    storages = read_storages(snapshot.fd)
    for number in wanted:
        if number not in storages:
            raise StoreError(f"The device no longer has storage {number}.", "damaged")
        if storages[number].lost:
            raise StoreError(
                "A tensor has no value, as the operation that made it failed: delete it first.",
                "damaged",
            )
    small = {number: storages[number].small for number in wanted if number not in extents}
    return [extents[number] for number in wanted if number in extents], small


def _all_extents(snapshot: Snapshot | None) -> list[ArenaExtent]:
    return list(read_tables(snapshot.fd).extents) if snapshot is not None else []
