"""Parser of the parts of a snapshot's file that the agent needs: header, extents, storages.

`native/worker/snapshot/tables.h` defines them. The rest of the file is used by workers only.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from kernelproxy.common.errors import WorkerError

MAGIC = 0x31504E53474E4953
VERSION = 3
PAGE_BYTES = 4096
EXTENT_BYTES_MIN = 4096
HEADER = struct.Struct("<QIIQQQQQQ")
ENTRY = struct.Struct("<QQIIQ")
_LOST = 2


@dataclass(frozen=True)
class ArenaExtent:
    """Location of one storage's bytes in the session's arena.

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
    """Content of a snapshot's file that the agent needs.

    Parameters
    ----------
    position : int
        Position in the session's log.
    device_kind : int
        `oplog.DeviceKind` of the device that it was made on.
    state_bytes : int
        Size of the state, in bytes.
    extents : tuple of Extent
        In the order of the file, which is also that of `Readiness`.
    table_bytes : int
        Length of the tables behind the extents, see `read_storages`.
    """

    position: int
    device_kind: int
    state_bytes: int
    extents: tuple[ArenaExtent, ...]
    table_bytes: int

    @property
    def arena_bytes(self) -> int:
        """End of the last extent."""
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
    return Tables(position, kind, state, extents, tables)


@dataclass(frozen=True)
class Storage:
    """One storage in the tables.

    Parameters
    ----------
    lost : bool
        Whether the operator that should have made it failed.
    filled : int
        Bytes from its start that hold values; the others are zeros.
    small : bytes
        These bytes, if they are not in an extent.
    """

    lost: bool
    filled: int
    small: bytes


def read_storages(fd: int) -> dict[int, Storage]:
    """Read the storages of a snapshot's file, by number.

    Raises
    ------
    WorkerError
        If its tables cannot be read.
    OSError
        If it cannot be read.
    """
    count = read_tables(fd).table_bytes
    raw = os.pread(fd, count, os.fstat(fd).st_size - count)
    reader = _TableReader(raw)
    try:
        for _ in range(reader.number("<I")):  # operators
            reader.text(), reader.text()
        for _ in range(reader.number("<I")):  # generators
            reader.skip(12)
            reader.text()
        reader.skip(12 * reader.number("<I"))  # events
        if reader.number("<B"):  # settings
            reader.text()
        reader.skip(4)  # failures
        if reader.number("<B"):
            reader.skip(9)
            reader.text(), reader.text()
        found = {}
        for _ in range(reader.number("<I")):
            number, life, _, _, _, filled, _ = reader.take("<IBBIQQQ")
            if life == _LOST:
                reader.text()
            small = reader.skip(filled) if filled < EXTENT_BYTES_MIN else b""
            found[number] = Storage(life == _LOST, filled, small)
        return found
    except struct.error as error:
        raise WorkerError("The tables of a snapshot cannot be read.") from error


class _TableReader:
    """Reads numbers and strings from bytes; raises ``struct.error`` at their end."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def take(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.skip(struct.calcsize(layout)))

    def number(self, layout: str) -> int:
        return self.take(layout)[0]

    def text(self) -> bytes:
        return self.skip(self.number("<I"))

    def skip(self, count: int) -> bytes:
        found = self._raw[self._at : self._at + count]
        if len(found) < count:
            raise struct.error("it ends too early")
        self._at += count
        return found


def _extent(offset: int, count: int, storage: int, reserved: int, version: int) -> ArenaExtent:
    if offset % PAGE_BYTES or count < EXTENT_BYTES_MIN or reserved or not version:
        raise WorkerError("A snapshot has an extent that cannot be.")
    return ArenaExtent(offset, count, storage, version)
