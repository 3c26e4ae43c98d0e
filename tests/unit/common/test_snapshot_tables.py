"""The agent's view of a snapshot's file."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.errors import WorkerError
from kernelproxy.common.protocol import snapshot_tables
from kernelproxy.common.protocol.snapshot_tables import (
    ArenaExtent,
    Storage,
    read_storages,
    read_tables,
)

SOURCE = (Path(__file__).parents[3] / "native/worker/snapshot/tables.h").read_text()
EXTENTS = [(8192, 5000, 3, 0, 7), (0, 4096, 9, 0, 8)]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("tables")
    yield fd
    os.close(fd)


def write(
    fd: int,
    entries: list[tuple[int, int, int, int, int]],
    *,
    magic: int = snapshot_tables.MAGIC,
    version: int = snapshot_tables.VERSION,
    size: int = 0,
) -> None:
    """Write a file with ten bytes of tables; `size` more or fewer than its header says."""
    offset = snapshot_tables.HEADER.size
    total = offset + len(entries) * snapshot_tables.ENTRY.size + 10
    header = (magic, version, 1, 640, total, 9096, offset, len(entries), 10)
    os.pwrite(fd, snapshot_tables.HEADER.pack(*header), 0)
    os.pwrite(fd, b"".join(snapshot_tables.ENTRY.pack(*entry) for entry in entries), offset)
    os.ftruncate(fd, total + size)


def constant(name: str) -> int:
    found = re.search(rf"{name} = (\w+);", SOURCE)
    assert found is not None
    return int(found[1], 0)


def test_constants_are_those_of_the_worker() -> None:
    assert constant("kSnapshotMagic") == snapshot_tables.MAGIC
    assert constant("kSnapshotVersion") == snapshot_tables.VERSION
    assert constant("kInlineBytes") == snapshot_tables.EXTENT_BYTES_MIN
    for name, layout in (
        ("SnapshotHeader", snapshot_tables.HEADER),
        ("ExtentEntry", snapshot_tables.ENTRY),
    ):
        assert f"static_assert(sizeof({name}) == {layout.size});" in SOURCE


def test_header_and_extents_are_read(fd: int) -> None:
    write(fd, EXTENTS)
    found = read_tables(fd)
    assert (found.position, found.device_kind, found.state_bytes) == (640, 1, 9096)
    assert found.extents == (ArenaExtent(8192, 5000, 3, 7), ArenaExtent(0, 4096, 9, 8))
    assert found.arena_bytes == 8192 + 5000


def test_a_snapshot_without_extents_is_one(fd: int) -> None:
    write(fd, [])
    assert read_tables(fd).arena_bytes == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"magic": 1}, "no snapshot"),
        ({"version": 1}, "version 1"),
        ({"size": -1}, "torn"),
        ({"size": 1}, "torn"),
    ],
)
def test_an_invalid_snapshot_is_refused(fd: int, change: dict[str, int], words: str) -> None:
    write(fd, EXTENTS, **change)
    with pytest.raises(WorkerError, match=words):
        read_tables(fd)


def test_an_empty_file_is_refused(fd: int) -> None:
    with pytest.raises(WorkerError, match="torn"):
        read_tables(fd)


@pytest.mark.parametrize(
    "entry",
    [
        (100, 5000, 1, 0, 1),  # not at a page boundary
        (16384, 100, 1, 0, 1),  # as small as the tables' content
        (16384, 5000, 1, 5, 1),  # of a later version
        (16384, 5000, 1, 0, 0),  # nowhere
        (4096, 5000, 1, 0, 1),  # in another one
    ],
)
def test_extents_that_cannot_be_are_refused(fd: int, entry: tuple[int, int, int, int, int]) -> None:
    write(fd, [*EXTENTS, entry])
    with pytest.raises(WorkerError):
        read_tables(fd)


def text(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def storages(fd: int, *entries: bytes, failure: bytes = b"\0") -> bytes:
    """Tables with two operators, a generator, an event, settings, and these storages."""
    operators = struct.pack("<I", 2) + text(b"aten::add_") + text(b"Tensor") + text(b"") + text(b"")
    generators = struct.pack("<IIQ", 1, 0, 42) + text(b"state")
    events = struct.pack("<IIq", 1, 3, -5)
    settings = b"\1" + text(b"\6\0\1")
    found = operators + generators + events + settings + struct.pack("<I", 2) + failure
    return found + struct.pack("<I", len(entries)) + b"".join(entries)


def storage(number: int, filled: int, *, lost: bytes = b"", small: bytes = b"") -> bytes:
    life = 2 if lost else 1
    entry = struct.pack("<IBBIQQQ", number, life, 1, 0, 10_000, filled, 77)
    return entry + (text(lost) if lost else b"") + small


def write_tables(fd: int, raw: bytes) -> None:
    total = snapshot_tables.HEADER.size + len(raw)
    header = (
        snapshot_tables.MAGIC,
        snapshot_tables.VERSION,
        1,
        640,
        total,
        0,
        snapshot_tables.HEADER.size,
        0,
        len(raw),
    )
    os.pwrite(fd, snapshot_tables.HEADER.pack(*header) + raw, 0)
    os.ftruncate(fd, total)


def test_storages_are_read_with_the_bytes_of_small_ones(fd: int) -> None:
    pending = b"\1\2" + struct.pack("<Q", 9) + text(b"aten::mm") + text(b"shapes")
    for failure in (b"\0", pending):
        entries = [
            storage(1, 3, small=b"abc"),
            storage(5, 0),
            storage(6, 5000),
            storage(9, 0, lost=b"aten::mm"),
        ]
        write_tables(fd, storages(fd, *entries, failure=failure))
        assert read_storages(fd) == {
            1: Storage(False, 3, b"abc"),
            5: Storage(False, 0, b""),
            6: Storage(False, 5000, b""),
            9: Storage(True, 0, b""),
        }


def test_torn_tables_are_refused(fd: int) -> None:
    whole = storages(fd, storage(1, 3, small=b"abc"), storage(9, 0, lost=b"aten::mm"))
    for length in range(len(whole)):
        write_tables(fd, whole[:length])
        with pytest.raises(WorkerError, match="cannot be read"):
            read_storages(fd)
