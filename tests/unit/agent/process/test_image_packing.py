"""Images of a process are restored unchanged from the store, with progress."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

from kernelproxy.agent.process.image_packing import Blobs, PackedImages, unpack
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Label, Manifest


def written(directory: Path, pages: bytes) -> dict[str, bytes]:
    directory.mkdir()
    content = {"core-2.img": b"core", "mm-2.img": b"", "pages-1.img": pages}
    for name, each in content.items():
        (directory / name).write_bytes(each)
    return content


def stored(store: ChunkStore, name: str, blobs: Blobs) -> Manifest:
    nothing = os.memfd_create("nothing")
    try:
        label = Label("ann", name, "checkpoint", "", "software")
        return store.put(label, nothing, [], blobs=blobs)
    finally:
        os.close(nothing)


def unpacked(store: ChunkStore, manifest: Manifest, directory: Path) -> dict[str, bytes]:
    """Unpack, and check the reported progress."""
    directory.mkdir()
    said: list[tuple[int, int]] = []
    unpack(store, manifest, directory, lambda *numbers: said.append(numbers))
    assert said[0][0] == 0
    assert said == sorted(said)
    assert len({total for _, total in said}) == 1
    assert said[-1][0] == said[-1][1] > 0
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_images_come_back_whole_and_as_a_delta(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store")
    pages = bytearray(random.Random(1).randbytes(3 << 20))
    first = written(tmp_path / "first", bytes(pages))
    pages[5000:5003] = b"new"
    second = written(tmp_path / "second", bytes(pages) + b"and an odd end")
    compared: list[int] = []
    with closing(PackedImages(tmp_path / "first")) as packed:
        assert packed.work(None) == 0
        base = stored(store, "one", packed.blobs(store, None, compared.append))
    assert compared == []
    with closing(PackedImages(tmp_path / "second")) as packed:
        blobs = packed.blobs(store, base, compared.append)
        assert sum(compared) == packed.work(base)
        later = stored(store, "two", blobs)
    assert later.stored_bytes < base.stored_bytes * 1.02
    assert unpacked(store, base, tmp_path / "one") == first
    assert unpacked(store, later, tmp_path / "two") == second
