"""The chunk store with damaged or unknown files, and with full disks."""

from __future__ import annotations

import os
import random
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelproxy.common.errors import StoreError
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Manifest
from tests.doubles.session.arena import MakeArena
from tests.unit.storage.test_manifest import signed
from tests.unit.storage.test_store import (
    CHUNK,
    chunk_files,
    label,
    restored,
    store_in,
)

MIB = 1 << 20


def file_of(store: ChunkStore, manifest: Manifest, extent: int = 0) -> Path:
    key = manifest.extent_chunks[extent][0]
    return store.root / "chunks" / key[:2] / key


def reason_of_get(store: ChunkStore, manifest: Manifest, make: MakeArena) -> str:
    with pytest.raises(StoreError) as caught:
        store.get(manifest, make().fd)
    assert "\n" not in str(caught.value)
    return caught.value.reason


@pytest.mark.slow
@pytest.mark.parametrize("content", [random.Random(1).randbytes(CHUNK), b"ab" * (CHUNK // 2)])
def test_any_flipped_bit_is_noticed(tmp_path: Path, make_arena: MakeArena, content: bytes) -> None:
    arena, store = make_arena(content), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    path, dice = file_of(store, manifest), random.Random(2)
    raw = path.read_bytes()
    bits = [*range(32 * 8), *(dice.randrange(8 * len(raw)) for _ in range(150))]
    for bit in bits:
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert reason_of_get(store, manifest, make_arena) == "damaged", bit
    path.write_bytes(raw)
    assert restored(store, manifest, make_arena()) == [content]


def test_a_cut_or_lengthened_or_missing_chunk_is_noticed(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    arena, store = make_arena(random.Random(1).randbytes(CHUNK)), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    path = file_of(store, manifest)
    raw = path.read_bytes()
    for wrong in (b"", raw[:1], raw[:4096], raw[:-4096], raw[:-1], raw + bytes(4096), raw * 2):
        path.write_bytes(wrong)
        assert reason_of_get(store, manifest, make_arena) == "damaged", len(wrong)
    path.with_name(path.name + ".damaged").unlink()
    assert reason_of_get(store, manifest, make_arena) == "missing"


def test_storing_the_same_bytes_again_repairs_damage(tmp_path: Path, make_arena: MakeArena) -> None:
    content = random.Random(1).randbytes(CHUNK)
    arena, store = make_arena(content), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    path = file_of(store, manifest)
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    assert reason_of_get(store, manifest, make_arena) == "damaged"
    # The only copy is left for inspection, and still distinguished from a missing one.
    store.collect()
    assert reason_of_get(store, manifest, make_arena) == "damaged"
    store.put(label("bob"), arena.fd, arena.extents)
    assert restored(store, manifest, make_arena()) == [content]
    assert store.collect().files == 1
    assert len(chunk_files(store)) == 1


def test_a_chunk_cut_short_is_not_relied_on(tmp_path: Path, make_arena: MakeArena) -> None:
    content = random.Random(1).randbytes(CHUNK)
    arena, store = make_arena(content), store_in(tmp_path)
    for name in ("one", "two"):
        manifest = store.put(label(name=name), arena.fd, arena.extents)
        os.truncate(file_of(store, manifest), 4096)
    # A file that no manifest names is checked more closely.
    store.delete("ann", "one")
    store.delete("ann", "two")
    manifest = store.put(label(), arena.fd, arena.extents)
    assert restored(store, manifest, make_arena()) == [content]


def test_a_damaged_blob_is_noticed(tmp_path: Path, make_arena: MakeArena) -> None:
    store = store_in(tmp_path)
    manifest = store.put(label(), make_arena().fd, [], blobs={"tables": b"tables"})
    (path,) = store.root.glob("chunks/*/*")
    path.write_bytes(path.read_bytes().replace(b"tables", b"tAbles"))
    with pytest.raises(StoreError) as caught:
        store.blob(manifest, "tables")
    assert caught.value.reason == "damaged"


def test_an_unreadable_manifest_is_refused_and_stops_collections(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    arena, store = make_arena(b"x"), store_in(tmp_path)
    store.put(label(name="bad"), arena.fd, arena.extents)
    other = make_arena(b"garbage")
    store.put(label(name="gone"), other.fd, other.extents)
    store.delete("ann", "gone")
    before = chunk_files(store)
    path = store.root / "manifests" / "ann" / "bad.json"
    good = path.read_bytes()
    for wrong, reason in (
        (good.replace(b"session", b"sessioN"), "damaged"),
        (b"", "damaged"),
        (signed({"format": 2}), "newer"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(StoreError, match=r"bad\.json") as caught:
            store.load("ann", "bad")
        assert caught.value.reason == reason
        with pytest.raises(StoreError, match=r"Nothing was collected, .*bad\.json") as caught:
            store.collect()
        assert caught.value.reason == reason
        # Other users can continue meanwhile.
        store.put(label("bob"), arena.fd, arena.extents)
        assert store.usage("ann") == len(wrong)
    path.write_bytes(good)
    assert store.collect().files == len(before) - 1
    assert restored(store, store.load("ann", "bad"), make_arena()) == [b"x"]


def test_an_unreadable_manifest_can_be_deleted(tmp_path: Path, make_arena: MakeArena) -> None:
    arena, store = make_arena(b"x"), store_in(tmp_path)
    store.put(label(), arena.fd, arena.extents)
    (store.root / "manifests" / "ann" / "one.json").write_bytes(b"{}")
    assert store.names() == [("ann", "one")]
    store.delete("ann", "one")
    assert store.collect().files == 1


def test_a_manifest_in_the_place_of_another_is_refused(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    arena, store = make_arena(b"x"), store_in(tmp_path)
    store.put(label(), arena.fd, arena.extents)
    directory = store.root / "manifests" / "ann"
    (directory / "one.json").rename(directory / "two.json")
    with pytest.raises(StoreError, match="is another's") as caught:
        store.load("ann", "two")
    assert caught.value.reason == "damaged"


def test_another_torch_is_refused_with_what_to_do(tmp_path: Path, make_arena: MakeArena) -> None:
    store = store_in(tmp_path)
    store.put(label(), make_arena().fd, [])
    with pytest.raises(StoreError, match=r"an environment with torch 2\.13\.0") as caught:
        store.load("ann", "one", torch="2.12.1")
    assert caught.value.reason == "torch"


def test_a_missing_manifest_is_unknown(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for use in (store.load, store.delete, store.sizes):
        with pytest.raises(StoreError, match="ann has nothing stored as one") as caught:
            use("ann", "one")
        assert caught.value.reason == "unknown"


@contextmanager
def file_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_refuses_leaves_everything_as_it_was(
    tmp_path: Path, make_arena: MakeArena
) -> None:
    store = store_in(tmp_path, chunk_bytes=2 * MIB)
    kept = make_arena(b"kept")
    store.put(label(), kept.fd, kept.extents)
    before = chunk_files(store)
    # Small chunks can be written, large ones cannot.
    dice = random.Random(1)
    arena = make_arena(*(dice.randbytes(4096) for _ in range(9)), dice.randbytes(2 * MIB))
    with file_limit(MIB), pytest.raises(StoreError, match="Cannot store one: File too") as caught:
        store.put(label(), arena.fd, arena.extents)
    assert caught.value.reason == "full"
    assert chunk_files(store) == before
    assert not [*store.root.glob("tmp/*")]
    assert restored(store, store.load("ann", "one"), make_arena()) == [b"kept"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted without privileges")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_leaves_everything_as_it_was(small_disk: Path, make_arena: MakeArena) -> None:
    store, dice = store_in(small_disk), random.Random(1)
    kept = make_arena(dice.randbytes(MIB // 2))
    store.put(label(), kept.fd, kept.extents)
    before = chunk_files(store)
    free = os.statvfs(small_disk).f_bfree
    large = make_arena(dice.randbytes(4 * MIB))
    with pytest.raises(StoreError, match=r"No space left .*; free some space") as caught:
        store.put(label(name="two"), large.fd, large.extents)
    assert (caught.value.reason, caught.value.recoverable) == ("full", True)
    assert chunk_files(store) == before
    assert not [*store.root.glob("tmp/*")]
    assert os.statvfs(small_disk).f_bfree >= free - 32  # directories of chunks stay
    assert store.names() == [("ann", "one")]
    small = make_arena(dice.randbytes(MIB // 4))
    store.put(label(name="two"), small.fd, small.extents)
    assert restored(store, store.load("ann", "two"), make_arena()) == [small.read(small.extents[0])]


def test_a_disk_that_fills_up_at_any_block_gives_all_or_nothing(
    small_disk: Path, make_arena: MakeArena
) -> None:
    store, dice, filler = store_in(small_disk), random.Random(1), small_disk / "filler"
    arena = make_arena(dice.randbytes(2 * CHUNK), dice.randbytes(100))
    outcomes = set[str]()
    for blocks in range(24):
        free = os.statvfs(small_disk).f_bfree
        filler.write_bytes(bytes(4096 * (free - blocks)))
        try:
            store.put(label(), arena.fd, arena.extents, blobs={"tables": b"tables"})
        except StoreError as error:
            outcomes.add(error.reason)
        else:
            outcomes.add("stored")
        if store.names():
            manifest = store.load("ann", "one")
            assert restored(store, manifest, make_arena())[1] == arena.read(arena.extents[1])
            store.delete("ann", "one")
        else:
            assert not chunk_files(store)
        filler.unlink()
        store.collect()
        assert not [*store.root.glob("tmp/*")]
    assert outcomes == {"full", "stored"}


def test_no_descriptors_are_lost_by_errors(tmp_path: Path, make_arena: MakeArena) -> None:
    arena, store = make_arena(random.Random(1).randbytes(CHUNK)), store_in(tmp_path)
    manifest = store.put(label(), arena.fd, arena.extents)
    file_of(store, manifest).write_bytes(b"damaged")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StoreError):
            store.get(manifest, arena.fd)
        with file_limit(4096), pytest.raises(StoreError):
            store.put(label(name="two"), arena.fd, arena.extents)
    assert len(os.listdir("/proc/self/fd")) == before
