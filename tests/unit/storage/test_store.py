"""The chunk store in one process: storing, sharing, accounting and freeing."""

from __future__ import annotations

import os
import random
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import InternalError, StoreError
from kernelproxy.storage.chunk_file import BufferPool
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Extent, Label, Manifest
from kernelproxy.storage.quota import StoreLimits
from kernelproxy.storage.threads import Cancel, file_lock
from kernelproxy.storage.writer import Kept, Part
from tests.doubles.session.arena import Arena, MakeArena

KIB = 1 << 10
CHUNK = 16 * KIB


def store_in(directory: Path, **options: Any) -> ChunkStore:
    return ChunkStore(directory / "store", **{"chunk_bytes": CHUNK, **options})


def label(owner: str = "ann", name: str = "one", **fields: Any) -> Label:
    return Label(owner, name, "session", "2.13.0", "software", **fields)


def chunk_files(store: ChunkStore) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in store.root.glob("chunks/*/*")}


def restored(store: ChunkStore, manifest: Manifest, arena: Arena) -> list[bytes]:
    store.get(manifest, arena.fd)
    return [arena.read(extent) for extent in manifest.extents]


# ---------------------------------------------------------------- storing and restoring


def test_reading_reports_progress_and_total(tmp_path: Path, make_arena: MakeArena) -> None:
    dice = random.Random(2)
    ranges = [dice.randbytes(3 * CHUNK + 5), b"", dice.randbytes(CHUNK)]
    store, arena = store_in(tmp_path), make_arena(*ranges)
    blobs = {"a": dice.randbytes(2 * CHUNK + 1), "b": b"x"}
    put = store.put(label(), arena.fd, arena.extents, blobs=blobs)
    read: list[int] = []
    store.get(put, arena.fd, progress=read.append)
    assert sorted(read) == [5, CHUNK, CHUNK, CHUNK, CHUNK]
    with open(tmp_path / "blobs", "wb") as file:
        store.write_blobs(put, ["a", "b"], file.fileno(), progress=read.append)
    assert read[5:] == [CHUNK, CHUNK, 1, 1]
    assert sum(read) == put.logical_bytes


def test_everything_comes_back(tmp_path: Path, make_arena: MakeArena) -> None:
    dice = random.Random(1)
    ranges = [
        dice.randbytes(3 * CHUNK + 5),
        bytes(2 * CHUNK),
        b"",
        b"x",
        dice.randbytes(CHUNK),
        b"again " * CHUNK,
    ]
    blobs = {"tables": dice.randbytes(2 * CHUNK + 1), "empty": b""}
    store, arena = store_in(tmp_path), make_arena(*ranges)
    put = store.put(label(position=9, meta={"a": 1}), arena.fd, arena.extents, blobs=blobs)
    loaded = ChunkStore(store.root).load("ann", "one", torch="2.13.0")
    assert loaded == put
    assert (loaded.label.position, loaded.label.meta) == (9, {"a": 1})
    assert restored(store, loaded, make_arena()) == ranges
    assert {name: store.blob(loaded, name) for name in loaded.blobs} == blobs
    assert loaded.logical_bytes == sum(map(len, ranges)) + sum(map(len, blobs.values()))


def test_blobs_come_from_files_and_go_to_files(tmp_path: Path, make_arena: MakeArena) -> None:
    dice = random.Random(1)
    content = dice.randbytes(5 * CHUNK)
    source = make_arena(content)
    parts = [(0, 10), (10, 0), (10, 3 * CHUNK), (7, 2 * CHUNK + 1)]
    blobs = {str(at): Part(source.fd, start, count) for at, (start, count) in enumerate(parts)}
    store = store_in(tmp_path)
    manifest = store.put(label(), source.fd, [], blobs=blobs)
    expected = [content[start : start + count] for start, count in parts]
    assert [store.blob(manifest, name) for name in blobs] == expected
    target = make_arena()
    assert store.write_blobs(manifest, list(blobs), target.fd) == [len(each) for each in expected]
    assert os.pread(target.fd, 10 * CHUNK, 0) == b"".join(expected)
    with pytest.raises(KeyError):
        store.write_blobs(manifest, ["none"], target.fd)
    too_long = {"x": Part(source.fd, 4 * CHUNK, 2 * CHUNK)}
    with pytest.raises(InternalError, match="ends at"):
        store.put(label(name="two"), source.fd, [], blobs=too_long)


def test_redundant_bytes_are_compressed_and_random_ones_cost_a_block(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    store = store_in(tmp_path, chunk_bytes=1 << 20)
    arena = make_arena(random.Random(1).randbytes(1 << 20), b"abcdefgh" * (1 << 17))
    manifest = store.put(label(), arena.fd, arena.extents)
    random_chunk, regular = (manifest.chunks[keys[0]] for keys in manifest.extent_chunks)
    assert random_chunk.stored == (1 << 20) + 4096
    assert regular.stored == 4096


def test_files_are_for_their_owner_alone(tmp_path: Path, make_arena: MakeArena) -> None:
    store, arena = store_in(tmp_path), make_arena(b"secret")
    old = os.umask(0)
    try:
        store = store_in(tmp_path / "deep")
        store.put(label(), arena.fd, arena.extents)
    finally:
        os.umask(old)
    for path in [store.root, *store.root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_snapshot_of_the_same_name_is_replaced(tmp_path: Path, make_arena: MakeArena) -> None:
    store = store_in(tmp_path)
    for raw in (b"first", b"second"):
        arena = make_arena(raw)
        store.put(label(), arena.fd, arena.extents)
    assert store.names() == [("ann", "one")]
    assert restored(store, store.load("ann", "one"), make_arena()) == [b"second"]
    store.collect()
    assert len(chunk_files(store)) == 1


def test_names_do_not_leave_the_store(tmp_path: Path, make_arena: MakeArena) -> None:
    store, arena = store_in(tmp_path), make_arena(b"x")
    for owner, name in (("..", "a"), ("ann", "../../a"), ("a/b", "c")):
        for use in (
            lambda: store.put(label(owner, name), arena.fd, arena.extents),  # noqa: B023
            lambda: store.load(owner, name),  # noqa: B023
            lambda: store.delete(owner, name),  # noqa: B023
        ):
            with pytest.raises(StoreError) as caught:
                use()
            assert caught.value.reason == "name"
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


# ---------------------------------------------------------------- sharing


@pytest.mark.slow
def test_second_snapshot_of_a_session_with_weights_adds_less_than_a_hundredth(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    # 1 GiB in chunks of 4 MiB, made sixteen times smaller.
    dice, chunk = random.Random(1), 256 * KIB
    store = store_in(tmp_path, chunk_bytes=chunk)
    arena = make_arena(*(dice.randbytes(4 * chunk - 4096 * n) for n in range(63)))
    cache = arena.add(dice.randbytes((64 << 20) // 200))
    first = store.put(label(), arena.fd, arena.extents)
    before = sum(chunk_files(store).values())
    arena.write(dice.randbytes(cache.count), cache.offset)
    second = store.put(label(name="two"), arena.fd, arena.extents)
    added = sum(chunk_files(store).values()) - before
    assert 0 < added < before / 100
    sizes = store.sizes("ann", "two")
    assert sizes.exclusive < before / 100 < before < sizes.stored
    assert restored(store, first, make_arena())[:-1] == restored(store, second, make_arena())[:-1]


def test_equal_weights_of_two_users_are_stored_once_wherever_they_lie(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    weights = [random.Random(n).randbytes(5 * CHUNK + n) for n in range(4)]
    store = store_in(tmp_path)
    ann, bob = make_arena(*weights), make_arena(b"something else", *reversed(weights))
    store.put(label("ann"), ann.fd, ann.extents)
    before = chunk_files(store)
    manifest = store.put(label("bob"), bob.fd, bob.extents)
    assert len(chunk_files(store)) == len(before) + 1
    assert restored(store, manifest, make_arena()) == [b"something else", *reversed(weights)]
    # Each user is charged for all chunks that they use; a total counts shared chunks once.
    assert store.usage("bob") > sum(before.values()) < store.usage("ann")
    assert store.usage() < store.usage("ann") + store.usage("bob") - sum(before.values()) + 1


def test_unchanged_ranges_are_not_read_again(tmp_path: Path, make_arena: MakeArena) -> None:
    store, arena = store_in(tmp_path), make_arena()
    same = arena.add(b"a" * CHUNK, version=3)
    changed = arena.add(b"b" * CHUNK, version=4)
    first = store.put(label(), arena.fd, arena.extents)
    # Changes in ranges that are not read cannot be noticed.
    arena.write(b"c" * CHUNK, same.offset)
    arena.write(b"d" * CHUNK, changed.offset)
    progress: list[tuple[int, int]] = []
    second = store.put(
        label(),
        arena.fd,
        [same, Extent(changed.offset, changed.count, 5)],
        previous=first,
        progress=lambda *now: progress.append(now),
    )
    assert restored(store, second, make_arena()) == [b"a" * CHUNK, b"d" * CHUNK]
    assert progress == [(CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK)]


def test_extents_of_a_worker_s_tables_will_do(tmp_path: Path, make_arena: MakeArena) -> None:
    @dataclass(frozen=True)
    class Other:
        offset: int
        count: int
        id: int
        version: int

    arena, store = make_arena(b"x"), store_in(tmp_path)
    first = store.put(label(), arena.fd, [Other(0, 1, 5, 7)])
    assert first.extents == (Extent(0, 1, 7),)
    arena.write(b"y", 0)
    again = store.put(label(), arena.fd, [Other(0, 1, 6, 7)], previous=first)
    assert restored(store, again, make_arena()) == [b"x"]


def test_unchanged_ranges_are_read_again_if_their_chunks_are_gone(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    store, arena = store_in(tmp_path), make_arena(b"a" * CHUNK)
    first = store.put(label(), arena.fd, arena.extents)
    store.delete("ann", "one")
    store.collect()
    second = store.put(label(), arena.fd, arena.extents, previous=first)
    assert restored(store, second, make_arena()) == [b"a" * CHUNK]


# ---------------------------------------------------------------- order and cancelling


def test_a_blob_of_an_earlier_snapshot_is_kept_without_being_read(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    store, arena = ChunkStore(tmp_path / "store", chunk_bytes=4096), make_arena()
    content = os.urandom(10_000)
    first = store.put(label(name="first"), arena.fd, [], blobs={"whole": content})
    second = store.put(label(name="second"), arena.fd, [], blobs={"same": Kept(first, "whole")})
    store.delete("ann", "first")
    store.collect()
    assert store.blob(second, "same") == content
    store.delete("ann", "second")
    store.collect()
    with pytest.raises(StoreError, match="not there") as refused:
        store.put(label(name="third"), arena.fd, [], blobs={"same": Kept(second, "same")})
    assert refused.value.reason == "missing"
    assert store.names() == []


def test_ranges_come_in_their_order_unless_others_are_wanted(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    arena = make_arena(*(bytes([n]) * 2 * CHUNK for n in range(5)), b"")
    store = store_in(tmp_path, get_threads=1)
    manifest = store.put(label(), arena.fd, arena.extents)
    there: list[int] = []
    store.get(manifest, arena.fd, on_extent=there.append)
    assert there == [5, 0, 1, 2, 3, 4]
    # Expected: 3 from the start; 1 as soon as 3 has arrived; nothing else after that.
    there.clear()
    store.get(
        manifest,
        arena.fd,
        on_extent=there.append,
        next_wanted=lambda: 3 if 3 not in there else 1 if 1 not in there else None,
    )
    assert there == [5, 3, 1, 0, 2, 4]


def test_storing_can_be_cancelled_and_leaves_nothing(tmp_path: Path, make_arena: MakeArena) -> None:
    arena = make_arena(random.Random(1).randbytes(40 * CHUNK))
    store, cancel = store_in(tmp_path), Cancel()
    with pytest.raises(StoreError) as caught:
        store.put(
            label(),
            arena.fd,
            arena.extents,
            progress=lambda done, _: cancel.set() if done else None,
            cancel=cancel,
        )
    assert caught.value.reason == "cancelled"
    assert not chunk_files(store)
    assert not store.names()


def test_reading_can_be_cancelled(tmp_path: Path, make_arena: MakeArena) -> None:
    arena = make_arena(*(bytes([n]) for n in range(40)))
    store, cancel, there = store_in(tmp_path, get_threads=1), Cancel(), []
    manifest = store.put(label(), arena.fd, arena.extents)

    def arrived(index: int) -> None:
        there.append(index)
        cancel.set()

    with pytest.raises(StoreError) as caught:
        store.get(manifest, arena.fd, on_extent=arrived, cancel=cancel)
    assert caught.value.reason == "cancelled"
    assert there == [0]


def test_an_error_of_a_callback_ends_the_job_and_its_threads(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    arena, store = make_arena(bytes(40 * CHUNK)), store_in(tmp_path)

    def fail(*_: object) -> None:
        raise LookupError("callback")

    with pytest.raises(LookupError, match="callback"):
        store.put(label(), arena.fd, arena.extents, progress=fail)
    manifest = store.put(label(), arena.fd, arena.extents)
    with pytest.raises(LookupError, match="callback"):
        store.get(manifest, arena.fd, on_extent=fail)
    assert not [thread for thread in threading.enumerate() if thread.name == "sing-store"]


@pytest.mark.parametrize("lost", [0, 7, 39])
def test_a_missing_chunk_ends_reading_and_its_threads(
    tmp_path: Path, make_arena: MakeArena, lost: int
) -> None:
    arena, store = make_arena(random.Random(1).randbytes(40 * CHUNK)), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    key = manifest.extent_chunks[0][lost]
    (store.root / "chunks" / key[:2] / key).unlink()
    with pytest.raises(StoreError) as caught:
        store.get(manifest, make_arena().fd)
    assert caught.value.reason == "missing"
    assert not [thread for thread in threading.enumerate() if thread.name == "sing-store"]


def test_reading_ends_where_a_thread_cannot_be_started(
    tmp_path: Path, make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, store = make_arena(random.Random(1).randbytes(40 * CHUNK)), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def fail_later(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_later)
    with pytest.raises(RuntimeError, match="new thread"):
        store.get(manifest, make_arena().fd)
    assert started
    assert not started[0].is_alive()


def test_reading_by_several_threads_can_be_cancelled(tmp_path: Path, make_arena: MakeArena) -> None:
    arena = make_arena(*(random.Random(n).randbytes(CHUNK) for n in range(40)))
    store, cancel, there = store_in(tmp_path), Cancel(), []
    manifest = store.put(label(), arena.fd, arena.extents)

    def arrived(index: int) -> None:
        there.append(index)
        cancel.set()

    with pytest.raises(StoreError) as caught:
        store.get(manifest, make_arena().fd, on_extent=arrived, cancel=cancel)
    assert caught.value.reason == "cancelled"
    assert len(there) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "sing-store"]


def test_buffers_are_kept_for_the_next_job_but_not_after_an_error() -> None:
    buffer_pool = BufferPool(kept_max=2)
    with buffer_pool.lend(CHUNK) as take:
        first = {id(buffer): buffer for buffer in (take(), take(), take())}
    assert len(first) == 3
    with buffer_pool.lend(CHUNK) as take:
        kept = [take(), take(), take()]
    assert sum(id(buffer) in first for buffer in kept) == 2

    def fail() -> None:
        with buffer_pool.lend(CHUNK) as take:
            kept[:] = [take(), take()]
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    with buffer_pool.lend(CHUNK) as take:
        assert take() not in kept
    with buffer_pool.lend(2 * CHUNK) as take:
        assert take().chunk_bytes == 2 * CHUNK


def test_an_extent_beyond_the_arena_is_our_bug(tmp_path: Path, make_arena: MakeArena) -> None:
    arena, store = make_arena(b"x"), store_in(tmp_path)
    with pytest.raises(InternalError, match="a file ends at 1"):
        store.put(label(), arena.fd, [Extent(0, 2)])
    assert not chunk_files(store)


# ---------------------------------------------------------------- counting and collecting


@pytest.mark.slow
def test_sizes_and_collection_agree_with_the_disk(tmp_path: Path, make_arena: MakeArena) -> None:
    dice, store = random.Random(11), store_in(tmp_path)
    places = [(owner, name) for owner in ("ann", "bob") for name in "xyz"]
    stored: dict[tuple[str, str], list[bytes]] = {}
    for step in range(60):
        place = dice.choice(places)
        if place in stored and dice.random() < 0.4:
            before = sum(chunk_files(store).values())
            store.collect()
            collected = sum(chunk_files(store).values())
            exclusive = store.sizes(*place).exclusive
            file = store.root / "manifests" / place[0] / f"{place[1]}.json"
            exclusive_chunks = exclusive - file.stat().st_size
            assert collected <= before
            store.delete(*place)
            del stored[place]
            assert store.collect().bytes == exclusive_chunks
            assert sum(chunk_files(store).values()) == collected - exclusive_chunks
        else:
            ranges = [random.Random(dice.randrange(8)).randbytes(3 * CHUNK) for _ in range(3)]
            arena = make_arena(*ranges)
            store.put(label(*place), arena.fd, arena.extents, blobs={"step": bytes([step])})
            stored[place] = ranges
        manifests = {path: path.stat().st_size for path in store.root.glob("manifests/*/*")}
        for owner in ("ann", "bob"):
            named = {
                key: size.stored
                for place in stored
                if place[0] == owner
                for key, size in store.load(*place).chunks.items()
            }
            files = sum(size for path, size in manifests.items() if path.parent.name == owner)
            assert store.usage(owner) == sum(named.values()) + files
    store.collect()
    assert store.usage() == sum(chunk_files(store).values()) + sum(manifests.values())
    assert set(store.names()) == set(stored)
    for place, ranges in stored.items():
        assert restored(store, store.load(*place), make_arena()) == ranges


def test_quota_of_an_owner_binds_him_alone(tmp_path: Path, make_arena: MakeArena) -> None:
    room = 10 * (CHUNK + 4096)
    store = store_in(tmp_path, limits=StoreLimits(owner=room))
    large = make_arena(random.Random(1).randbytes(9 * CHUNK))
    store.put(label(), large.fd, large.extents)
    before = chunk_files(store)
    other = make_arena(random.Random(2).randbytes(3 * CHUNK))
    with pytest.raises(StoreError, match="What ann stores would take more") as caught:
        store.put(label(name="two"), other.fd, other.extents)
    assert caught.value.reason == "quota"
    assert chunk_files(store) == before
    assert store.names() == [("ann", "one")]
    store.put(label("bob"), other.fd, other.extents)
    # Existing chunks cost nothing, and replaced ones are freed.
    store.put(label(name="two"), large.fd, large.extents)
    store.delete("ann", "two")
    store.put(label(), other.fd, other.extents)
    assert store.usage("ann") <= room


def test_a_certain_payer_may_have_a_quota_that_changes(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    payers = {"ann": 2 * (CHUNK + 4096)}
    store = store_in(tmp_path, limits=StoreLimits(payers=payers))
    large = make_arena(random.Random(1).randbytes(3 * CHUNK))
    for_ann = label("7", meta={"user": "ann"})
    with pytest.raises(StoreError, match="What ann stores would take more"):
        store.put(for_ann, large.fd, large.extents)
    store.put(label("7", "two", meta={"user": "bob"}), large.fd, large.extents)
    assert store.usage("ann") == store.usage("7") == 0
    payers["ann"] *= 2
    store.put(for_ann, large.fd, large.extents)
    assert store.usage("ann") > 3 * CHUNK


def test_quota_of_the_store_counts_shared_chunks_once(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    store = store_in(tmp_path, limits=StoreLimits(store=12 * (CHUNK + 4096)))
    weights = make_arena(random.Random(1).randbytes(9 * CHUNK))
    store.put(label("ann"), weights.fd, weights.extents)
    store.put(label("bob"), weights.fd, weights.extents)
    other = make_arena(random.Random(2).randbytes(3 * CHUNK))
    with pytest.raises(StoreError, match="The store would take more") as caught:
        store.put(label("cat"), other.fd, other.extents)
    assert caught.value.reason == "quota"
    assert store.usage() <= 12 * (CHUNK + 4096)


def test_quota_counts_what_others_publish_meanwhile(tmp_path: Path, make_arena: MakeArena) -> None:
    store = store_in(tmp_path, limits=StoreLimits(store=6 * (CHUNK + 4096)), threads=1)
    mine = make_arena(random.Random(1).randbytes(4 * CHUNK))
    others = make_arena(random.Random(2).randbytes(4 * CHUNK))

    def overtake(done: int, _: int) -> None:
        if not done:
            store.put(label("bob"), others.fd, others.extents)

    with pytest.raises(StoreError) as caught:
        store.put(label("ann"), mine.fd, mine.extents, progress=overtake)
    assert caught.value.reason == "quota"
    assert store.names() == [("bob", "one")]


def test_nothing_can_be_collected_during_a_read(tmp_path: Path, make_arena: MakeArena) -> None:
    arena, store = make_arena(b"x"), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    refused: list[str] = []

    def arrived(_: int) -> None:
        store.delete("ann", "one")
        with pytest.raises(StoreError) as caught:
            store.collect()
        refused.append(caught.value.reason)

    store.get(manifest, arena.fd, on_extent=arrived)
    assert refused == ["busy"]
    assert store.collect().files == 1


def test_storing_waits_for_a_collection_with_a_time_limit(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    arena, store = make_arena(b"x"), store_in(tmp_path, lock_seconds=0.05)
    with file_lock(store.root / "lock", shared=False, seconds=0.0, cancel=Cancel()):
        with pytest.raises(StoreError) as caught:
            store.put(label(), arena.fd, arena.extents)
        assert caught.value.reason == "busy"
        assert caught.value.recoverable
        patient, cancel = store_in(tmp_path), Cancel()
        cancel.set()
        with pytest.raises(StoreError) as caught:
            patient.put(label(), arena.fd, arena.extents, cancel=cancel)
        assert caught.value.reason == "cancelled"
    store.put(label(), arena.fd, arena.extents)


def test_files_beside_the_store_count_against_its_limit(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    beside = 0
    store = store_in(tmp_path, limits=StoreLimits(store=1 << 20), beside=lambda: beside)
    arena = make_arena(b"some")
    store.put(label(), arena.fd, arena.extents)
    beside = 1 << 20
    with pytest.raises(StoreError, match=r"with 1\.0 MiB of kernels that hibernate") as refused:
        store.put(label(name="two"), arena.fd, arena.extents)
    assert refused.value.reason == "quota"
    beside = 0
    store.put(label(name="two"), arena.fd, arena.extents)
