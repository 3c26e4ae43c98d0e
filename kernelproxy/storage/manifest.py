"""Manifests: each names all chunks of one stored snapshot. Pure: this module accesses no files.

A manifest file is a line of JSON and a line ``blake3 <hex>`` with the hash of the first line,
including its newline. The hash is checked before the JSON is parsed, and the version before all
other fields; docs/format.md describes the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kernelproxy.common.errors import StoreError
from kernelproxy.common.untrusted import parse_json
from kernelproxy.storage.optional_deps import hash_of

FORMAT_VERSION = 1
#: Maximum accepted length of a chunk, in bytes: it limits the memory that a reader allocates.
CHUNK_BYTES_MAX = 64 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
_KEY = re.compile(r"[0-9a-f]{64}")
_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Label:
    """Description of a stored snapshot.

    Parameters
    ----------
    owner : str
        Its owner, such as a user id; a directory's name, see `check_name`.
    name : str
        Its name, such as a session id; a file's name, see `check_name`.
    kind : str
        One word, such as ``session`` or ``checkpoint``.
    torch : str
        Version of torch that wrote it.
    device_kind : str
        One word: ``software`` or ``cuda``.
    position : int
        Position of the snapshot in the log.
    meta : dict
        Other data of the caller; must be JSON. If it has a ``user``, that is the payer.
    """

    owner: str
    name: str
    kind: str
    torch: str
    device_kind: str
    position: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def payer(self) -> str:
        """Payer of the snapshot: the ``user`` in `meta`, else the owner."""
        return str(self.meta.get("user") or self.owner)


class Range(Protocol):
    """A range of an arena, in bytes, such as `ArenaExtent`.

    Two ranges of a session with the same offset, count and version hold the same bytes.
    """

    @property
    def offset(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def version(self) -> int: ...


@dataclass(frozen=True)
class Extent:
    """A `Range` in a manifest."""

    offset: int
    count: int
    version: int = 0


@dataclass(frozen=True)
class Size:
    """Length of a chunk's content, and of the file that holds it, in bytes."""

    content: int
    stored: int


@dataclass(frozen=True)
class Blob:
    """A named byte string."""

    count: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """A stored snapshot.

    Parameters
    ----------
    label : Label
        Its description.
    created : float
        Time when it was stored, in seconds since the epoch.
    chunk_bytes : int
        Length of all chunks except the last one of each extent and blob.
    chunks : dict of str to Size
        All distinct chunks, by the hexadecimal blake3 of their content.
    blobs : dict of str to Blob
        Named byte strings.
    extents : tuple of Extent
        Ranges of the arena, in the order given by the caller.
    extent_chunks : tuple of tuple of str
        For each extent its chunks, in order.
    """

    label: Label
    created: float
    chunk_bytes: int
    chunks: Mapping[str, Size]
    blobs: Mapping[str, Blob]
    extents: tuple[Extent, ...]
    extent_chunks: tuple[tuple[str, ...], ...]

    @property
    def logical_bytes(self) -> int:
        """Number of bytes that it restores."""
        blobs = sum(blob.count for blob in self.blobs.values())
        return blobs + sum(extent.count for extent in self.extents)

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of its distinct chunks on disk."""
        return sum(size.stored for size in self.chunks.values())


def cut(count: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return offset and length of each chunk of `count` bytes."""
    return [(at, min(chunk_bytes, count - at)) for at in range(0, count, chunk_bytes)]


def check_name(text: str, what: str) -> str:
    """Check that `text` is a single safe component of a path, and return it.

    It must have 1 to 128 letters, digits and ``._@+-``, and begin with a letter or digit.

    Raises
    ------
    StoreError
        If it is not valid.
    """
    if not _NAME.fullmatch(text):
        raise StoreError(
            f"{text!r} cannot be the {what} of a stored snapshot: use 1 to 128 letters, digits "
            "and ._@+-, beginning with a letter or digit.",
            "name",
        )
    return text


def encode(manifest: Manifest) -> bytes:
    """Serialize a manifest to the bytes of its file."""
    label = manifest.label
    numbers = {key: number for number, key in enumerate(manifest.chunks)}

    def numbered(keys: Iterable[str]) -> list[int]:
        return [numbers[key] for key in keys]

    body = {
        "format": FORMAT_VERSION,
        "owner": label.owner,
        "name": label.name,
        "kind": label.kind,
        "created": manifest.created,
        "torch": label.torch,
        "device_kind": label.device_kind,
        "position": label.position,
        "meta": label.meta,
        "logical_bytes": manifest.logical_bytes,
        "stored_bytes": manifest.stored_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "chunks": [[key, size.content, size.stored] for key, size in manifest.chunks.items()],
        "blobs": {
            name: [blob.count, numbered(blob.chunks)] for name, blob in manifest.blobs.items()
        },
        "extents": [
            [extent.offset, extent.count, extent.version, numbered(keys)]
            for extent, keys in zip(manifest.extents, manifest.extent_chunks, strict=True)
        ],
    }
    line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    return line + b"blake3 " + hash_of(line).encode() + b"\n"


def decode(raw: bytes, what: str) -> Manifest:
    """Parse a manifest's file; `what` names the file in errors.

    Raises
    ------
    StoreError
        ``damaged``, or ``newer`` if a later version of this package wrote it.
    """
    line, newline, rest = raw.partition(b"\n")
    if rest != b"blake3 " + hash_of(line + newline).encode() + b"\n":
        raise StoreError(f"The manifest {what} is damaged: its hash is wrong.", "damaged")
    try:
        body = parse_json(line)
        version = _integer(body["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"The manifest {what} is damaged: {error!r}.", "damaged") from error
    if version > FORMAT_VERSION:
        raise StoreError(
            f"The manifest {what} has version {version}, and this installation knows "
            f"{FORMAT_VERSION}: update jupyter_sing.",
            "newer",
        )
    try:
        return _parse(body)
    except (ValueError, KeyError, TypeError, IndexError, StoreError) as error:
        raise StoreError(f"The manifest {what} is damaged: {error!r}.", "damaged") from error


def _parse(body: Any) -> Manifest:
    """Validate the parsed first line, and convert it to a manifest."""
    chunk_bytes = _integer(body["chunk_bytes"], 1, CHUNK_BYTES_MAX)
    keys: list[str] = []
    chunks: dict[str, Size] = {}
    for key, content, stored in body["chunks"]:
        if not _KEY.fullmatch(key):
            raise ValueError(f"no hash: {key!r}")
        keys.append(key)
        chunks[key] = Size(_integer(content, 1, chunk_bytes), _integer(stored, 1))

    def named(numbers: Any, count: int) -> tuple[str, ...]:
        found = tuple(keys[_integer(number)] for number in numbers)
        if len(found) != -(-_integer(count) // chunk_bytes) or [
            chunks[key].content for key in found
        ] != [length for _, length in cut(count, chunk_bytes)]:
            raise ValueError(f"{len(found)} chunks do not make {count} bytes")
        return found

    blobs = {
        name: Blob(_integer(count), named(numbers, count))
        for name, (count, numbers) in body["blobs"].items()
    }
    extents, extent_chunks = [], []
    for offset, count, version, numbers in body["extents"]:
        _integer(_integer(offset) + _integer(count))
        extents.append(Extent(offset, count, _integer(version, 0, (1 << 64) - 1)))
        extent_chunks.append(named(numbers, count))
    label = Label(
        owner=check_name(body["owner"], "owner"),
        name=check_name(body["name"], "name"),
        kind=str(body["kind"]),
        torch=str(body["torch"]),
        device_kind=str(body["device_kind"]),
        position=_integer(body["position"], 0, (1 << 64) - 1),
        meta=dict(body["meta"]),
    )
    return Manifest(
        label,
        float(body["created"]),
        chunk_bytes,
        chunks,
        blobs,
        tuple(extents),
        tuple(extent_chunks),
    )


def _integer(value: Any, low: int = 0, high: int = _OFFSET_MAX) -> int:
    """Check that a value is a whole number from `low` to `high`, and return it."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
    return value
