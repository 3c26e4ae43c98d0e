"""The agent's view of a snapshot's file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.errors import WorkerError
from kernelproxy.snapshot import tables
from kernelproxy.snapshot.tables import Extent, read_tables

SOURCE = (Path(__file__).parents[2] / "native" / "worker" / "tables.h").read_text()
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
    magic: int = tables.MAGIC,
    version: int = tables.VERSION,
    size: int = 0,
) -> None:
    """Write a file with ten bytes of tables; `size` more or fewer than its header says."""
    offset = tables.HEADER.size
    total = offset + len(entries) * tables.ENTRY.size + 10
    header = (magic, version, 1, 640, total, 9096, offset, len(entries), 10)
    os.pwrite(fd, tables.HEADER.pack(*header), 0)
    os.pwrite(fd, b"".join(tables.ENTRY.pack(*entry) for entry in entries), offset)
    os.ftruncate(fd, total + size)


def constant(name: str) -> int:
    found = re.search(rf"{name} = (\w+);", SOURCE)
    assert found is not None
    return int(found[1], 0)


def test_constants_are_those_of_the_worker() -> None:
    assert constant("kSnapshotMagic") == tables.MAGIC
    assert constant("kSnapshotVersion") == tables.VERSION
    assert constant("kInlineBytes") == tables.EXTENT_BYTES_MIN
    for name, layout in (("SnapshotHeader", tables.HEADER), ("ExtentEntry", tables.ENTRY)):
        assert f"static_assert(sizeof({name}) == {layout.size});" in SOURCE


def test_header_and_extents_are_read(fd: int) -> None:
    write(fd, EXTENTS)
    found = read_tables(fd)
    assert (found.position, found.device_kind, found.state_bytes) == (640, 1, 9096)
    assert found.extents == (Extent(8192, 5000, 3, 7), Extent(0, 4096, 9, 8))
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
def test_what_is_no_snapshot_is_refused(fd: int, change: dict[str, int], words: str) -> None:
    write(fd, EXTENTS, **change)
    with pytest.raises(WorkerError, match=words):
        read_tables(fd)


def test_an_empty_file_is_refused(fd: int) -> None:
    with pytest.raises(WorkerError, match="torn"):
        read_tables(fd)


@pytest.mark.parametrize(
    "entry",
    [
        (100, 5000, 1, 0, 1),  # not at a page
        (16384, 100, 1, 0, 1),  # as small as what lies in the tables
        (16384, 5000, 1, 5, 1),  # of a later version
        (16384, 5000, 1, 0, 0),  # nowhere
        (4096, 5000, 1, 0, 1),  # in another one
    ],
)
def test_extents_that_cannot_be_are_refused(fd: int, entry: tuple[int, int, int, int, int]) -> None:
    write(fd, [*EXTENTS, entry])
    with pytest.raises(WorkerError):
        read_tables(fd)
