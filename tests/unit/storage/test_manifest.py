"""Manifests: written, read back, and refused."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from blake3 import blake3

from kernelproxy.common.errors import StoreError
from kernelproxy.storage.manifest import (
    Blob,
    Extent,
    Label,
    Manifest,
    Size,
    check_name,
    cut,
    decode,
    encode,
)

LABEL = Label("1000", "kernel-1", "session", "2.13.0+cpu", "software", 7, {"user": {"a": [1]}})


def some_manifest(dice: random.Random) -> Manifest:
    chunk_bytes = dice.randrange(1, 100)
    chunks: dict[str, Size] = {}

    def keys(count: int) -> tuple[str, ...]:
        found = []
        for _, length in cut(count, chunk_bytes):
            same = [key for key, size in chunks.items() if size.content == length]
            key = dice.choice(same) if same and dice.random() < 0.3 else dice.randbytes(32).hex()
            chunks.setdefault(key, Size(length, dice.randrange(1, 1 << 40)))
            found.append(key)
        return tuple(found)

    counts = [
        dice.choice([0, 1, chunk_bytes, dice.randrange(1000)]) for _ in range(dice.randrange(9))
    ]
    return Manifest(
        label=LABEL,
        created=dice.random() * 1e9,
        chunk_bytes=chunk_bytes,
        blobs={f"blob {n}": Blob(n * 50, keys(n * 50)) for n in range(dice.randrange(4))},
        extents=tuple(
            Extent(dice.randrange(1 << 50), count, dice.randrange(1 << 64)) for count in counts
        ),
        extent_chunks=tuple(keys(count) for count in counts),
        chunks=chunks,
    )


def signed(body: object) -> bytes:
    line = json.dumps(body).encode() + b"\n"
    return line + b"blake3 " + blake3(line).hexdigest().encode() + b"\n"


def body_of(manifest: Manifest) -> dict[str, Any]:
    return json.loads(encode(manifest).partition(b"\n")[0])


@pytest.mark.parametrize("seed", range(50))
def test_round_trip(seed: int) -> None:
    manifest = some_manifest(random.Random(seed))
    assert decode(encode(manifest), "it") == manifest


def test_sizes_are_written_down() -> None:
    manifest = some_manifest(random.Random(5))
    body = body_of(manifest)
    assert body["logical_bytes"] == manifest.logical_bytes > 0
    assert body["stored_bytes"] == sum(size.stored for size in manifest.chunks.values())


def test_any_changed_byte_and_any_cut_is_noticed() -> None:
    raw = encode(some_manifest(random.Random(2)))
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1 << place % 8
        for wrong in (bytes(changed), raw[:place]):
            with pytest.raises(StoreError) as caught:
                decode(wrong, "it")
            assert caught.value.reason == "damaged"


def test_a_manifest_nested_too_deeply_is_damaged() -> None:
    line = b"[" * 200_000 + b"\n"
    with pytest.raises(StoreError, match="nested too deeply") as caught:
        decode(line + b"blake3 " + blake3(line).hexdigest().encode() + b"\n", "it")
    assert caught.value.reason == "damaged"


def test_newer_version_is_distinguished_from_damage_whatever_it_holds() -> None:
    with pytest.raises(StoreError, match=r"has version 2, .* update jupyter_sing") as caught:
        decode(signed({"format": 2, "chunks": "in another way"}), "it")
    assert caught.value.reason == "newer"


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"format": True},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
        {"chunks": [["../../etc/passwd", 1, 1]]},
        {"chunks": [["ab" * 32, 1 << 40, 1]]},
        {"chunks": None},
        {"extents": [[0, 10, 0, [99]]]},
        {"extents": [[0, 10, 0, [-1]]]},
        {"extents": [[0, 1 << 62, 0, []]]},
        {"extents": [[-4096, 0, 0, []]]},
        {"extents": [[1 << 62, 1 << 62, 0, []]]},
        {"extents": [[0]]},
        {"blobs": {"tables": [1, []]}},
        {"owner": "../root"},
        {"name": None},
        {"position": "7"},
        {"meta": 5},
    ],
    ids=str,
)
def test_an_inconsistent_manifest_is_refused(change: dict[str, Any]) -> None:
    body = body_of(some_manifest(random.Random(1)))
    decode(signed(body), "it")
    with pytest.raises(StoreError) as caught:
        decode(signed({**body, **change}), "it")
    assert caught.value.reason == "damaged"


@pytest.mark.parametrize("name", ["a", "1000", "kernel-1.2_x@host+y", "0" * 128])
def test_harmless_names_are_taken(name: str) -> None:
    assert check_name(name, "name") == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "a/b", "/a", "a\n", "a\0", "-rf", "ä", "0" * 129, "a b"]
)
def test_names_that_could_leave_the_directory_are_refused(name: str) -> None:
    with pytest.raises(StoreError) as caught:
        check_name(name, "name")
    assert caught.value.reason == "name"


def test_cut_covers_everything_once() -> None:
    assert cut(0, 4) == []
    assert cut(4, 4) == [(0, 4)]
    assert cut(9, 4) == [(0, 4), (4, 4), (8, 1)]


def test_a_manifest_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        some_manifest(random.Random(0)).created = 0.0  # type: ignore[misc]
