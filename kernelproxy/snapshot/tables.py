"""The file of a snapshot, as far as the agent must understand it: its header and its extents.

`native/worker/tables.h` defines them. Everything else in the file is between workers.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from kernelproxy.errors import WorkerError

MAGIC = 0x31504E53474E4953
VERSION = 2
PAGE_BYTES = 4096
EXTENT_BYTES_MIN = 4096
HEADER = struct.Struct("<QIIQQQQQQ")
ENTRY = struct.Struct("<QQIIQ")


@dataclass(frozen=True)
class Extent:
    """Where the bytes of one storage lie in the session's arena.

    Parameters
    ----------
    offset, count : int
        In bytes; `offset` is a multiple of a page.
    id : int
        Number of the storage.
    version : int
        Two extents of a session with the same offset and version hold the same bytes.
    """

    offset: int
    count: int
    id: int
    version: int


@dataclass(frozen=True)
class Tables:
    """What a snapshot's file says to the agent.

    Parameters
    ----------
    position : int
        Of the session's log.
    device_kind : int
        `oplog.DeviceKind` of the device that it was made on.
    state_bytes : int
        What the snapshot stands for, in bytes.
    extents : tuple of Extent
        In the order of the file, which is that of `Readiness`.
    """

    position: int
    device_kind: int
    state_bytes: int
    extents: tuple[Extent, ...]

    @property
    def arena_bytes(self) -> int:
        """Where the last extent ends."""
        return max((extent.offset + extent.count for extent in self.extents), default=0)


def read_tables(fd: int) -> Tables:
    """Read and check header and extents of a snapshot's file.

    Raises
    ------
    WorkerError
        If the file is not a snapshot of this version, or its extents overlap.
    OSError
        If it cannot be read.
    """
    raw = os.pread(fd, HEADER.size, 0)
    if len(raw) < HEADER.size:
        raise WorkerError("A snapshot is torn.")
    magic, version, kind, position, total, state, offset, count, tables = HEADER.unpack(raw)
    if magic != MAGIC:
        raise WorkerError("A file is no snapshot.")
    if version != VERSION:
        raise WorkerError(f"A snapshot has version {version}, expected {VERSION}.")
    end = offset + count * ENTRY.size
    if total != os.fstat(fd).st_size or offset != HEADER.size or end + tables != total:
        raise WorkerError("A snapshot is torn.")
    index = os.pread(fd, end - offset, offset)
    extents = tuple(_extent(*entry) for entry in ENTRY.iter_unpack(index))
    occupied = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset < occupied:
            raise WorkerError("Extents of a snapshot overlap.")
        occupied = extent.offset + extent.count
    return Tables(position, kind, state, extents)


def _extent(offset: int, count: int, storage: int, reserved: int, version: int) -> Extent:
    if offset % PAGE_BYTES or count < EXTENT_BYTES_MIN or reserved or not version:
        raise WorkerError("A snapshot has an extent that cannot be.")
    return Extent(offset, count, storage, version)
