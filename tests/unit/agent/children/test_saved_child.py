"""Sessions of children in a manifest, and the views from which they are restored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.agent.children.saved_child import PAGES, ChildSide, child_view, children_of
from kernelproxy.agent.spill.spill_store import TABLES
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import StoreError
from kernelproxy.common.protocol import snapshot_tables
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Extent, Label, Manifest

LABEL = Label("ann", "one", "checkpoint", "", "software")
EXTENTS = [Extent(8192, 5000, 7), Extent(0, 4096, 8)]


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create(name) for name in ("tables", "arena", "nothing", "found")]
    yield made
    for fd in made:
        os.close(fd)


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "store", chunk_bytes=4096)


def side(fds: list[int], **fields: Any) -> ChildSide:
    """Return a child with a snapshot of two extents, and random bytes in its arena."""
    entries = b"".join(
        snapshot_tables.ENTRY.pack(each.offset, each.count, number, 0, each.version)
        for number, each in enumerate(EXTENTS)
    )
    offset = snapshot_tables.HEADER.size
    total = offset + len(entries)
    header = (snapshot_tables.MAGIC, snapshot_tables.VERSION, 1, 640, total, 9096, offset, 2, 0)
    os.pwrite(fds[0], snapshot_tables.HEADER.pack(*header) + entries, 0)
    os.pwrite(fds[1], os.urandom(16384), 0)
    given = {"pages": b"p" * 12288, "snapshot": Snapshot(fds[0], 640, 9096), "arena_fd": fds[1]}
    return ChildSide(**{**given, "stored": None, "about": {"session": "x"}, **fields})


def put(store: ChunkStore, nothing: int, *sides: ChildSide) -> Manifest:
    blobs = {}
    for number, each in enumerate(sides):
        blobs.update(each.blobs(number))
    meta = {"process": {"children": [each.described() for each in sides]}}
    return store.put(replace(LABEL, meta=meta), nothing, [], blobs=blobs)


def content(fd: int) -> list[bytes]:
    return [os.pread(fd, each.count, each.offset) for each in EXTENTS]


def test_a_child_comes_back_as_it_was(store: ChunkStore, fds: list[int]) -> None:
    tables, arena, nothing, found = fds
    unused = ChildSide(b"q" * 12288, None, arena, None, {"session": "y"})
    manifest = put(store, nothing, unused, side(fds))
    assert [each["session"] for each in children_of(manifest)] == ["y", "x"]
    view = child_view(store.load("ann", "one"), 1)
    assert store.blob(view, PAGES) == b"p" * 12288
    assert store.blob(view, TABLES) == os.pread(tables, 1 << 20, 0)
    assert list(view.extents) == EXTENTS
    store.get(view, found)
    assert content(found) == content(arena)
    without = child_view(manifest, 0)
    assert (set(without.blobs), without.extents) == ({PAGES}, ())
    assert store.blob(without, PAGES) == b"q" * 12288


def test_a_session_that_begins_from_it_reads_nothing(store: ChunkStore, fds: list[int]) -> None:
    """Its manifest names the chunks of the checkpoint."""
    _, arena, nothing, found = fds
    view = child_view(put(store, nothing, side(fds)), 0)
    begun = store.put(replace(LABEL, name="two"), nothing, EXTENTS, previous=view)
    assert set(begun.chunks) <= set(view.chunks)
    store.get(begun, found)
    assert content(found) == content(arena)


def test_a_spilled_child_is_not_read(store: ChunkStore, fds: list[int]) -> None:
    tables, arena, nothing, found = fds
    before = side(fds)
    expected = content(arena)
    spilled = store.put(replace(LABEL, name="state"), arena, EXTENTS)
    os.ftruncate(arena, 0)
    manifest = put(store, nothing, replace(before, stored=spilled))
    store.delete("ann", "state")
    store.collect()
    store.get(child_view(manifest, 0), found)
    assert content(found) == expected
    assert tables


def test_a_checkpoint_that_lacks_an_extent_is_damaged(store: ChunkStore, fds: list[int]) -> None:
    manifest = put(store, fds[2], side(fds))
    blobs = {name: each for name, each in manifest.blobs.items() if "extent-1" not in name}
    with pytest.raises(StoreError, match="damaged") as raised:
        child_view(replace(manifest, blobs=blobs), 0)
    assert raised.value.reason == "damaged"


def test_a_checkpoint_without_children_has_none(store: ChunkStore, fds: list[int]) -> None:
    assert children_of(store.put(LABEL, fds[2], [])) == []
