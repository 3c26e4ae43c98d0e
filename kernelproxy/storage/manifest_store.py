"""Manifest files, which are published atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kernelproxy.common.errors import StoreError
from kernelproxy.storage.chunk_file import sync_directory
from kernelproxy.storage.manifest import Manifest, check_name, decode
from kernelproxy.storage.quota import ManifestFile

_SUFFIX = ".json"


class Shelf:
    """The directory ``manifests`` of a store, with one directory for each owner."""

    def __init__(self, root: Path) -> None:
        self.directory, self._temporary = root / "manifests", root / "tmp"

    def path(self, owner: str, name: str) -> Path:
        """Return the path of a manifest.

        Raises
        ------
        StoreError
            If a name is invalid.
        """
        return self.directory / check_name(owner, "owner") / (check_name(name, "name") + _SUFFIX)

    def load(self, owner: str, name: str) -> Manifest:
        """Read a manifest.

        Raises
        ------
        StoreError
            ``unknown``, ``damaged`` or ``newer``.
        """
        path = self.path(owner, name)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise StoreError(f"{owner} has nothing stored as {name}.", "unknown") from None
        manifest = decode(raw, str(path))
        if (manifest.label.owner, manifest.label.name) != (owner, name):
            raise StoreError(f"The manifest {path} is damaged: it is another's.", "damaged")
        return manifest

    def files(self) -> Iterator[Path]:
        """Yield all files that a collection must be able to read before it removes a chunk."""
        for owner in sorted(self.directory.iterdir()):
            yield from sorted(owner.iterdir()) if owner.is_dir() else [owner]

    def entries(self) -> Iterator[ManifestFile]:
        """Yield all manifests, also unreadable ones; those deleted meanwhile may be missing."""
        for path in self.files():
            try:
                yield self._entry(path)
            except FileNotFoundError:
                continue

    def _entry(self, path: Path) -> ManifestFile:
        raw = path.read_bytes()
        try:
            manifest = decode(raw, str(path))
        except StoreError:
            manifest = None
        return ManifestFile(path.parent.name, path.name.removesuffix(_SUFFIX), len(raw), manifest)

    def publish(self, path: Path, raw: bytes) -> None:
        """Publish a manifest; it survives a loss of power when this returns."""
        temporary = self._temporary / secrets.token_hex(8)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(fd)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # Always, because the process that created the directory may have died before its sync.
            sync_directory(self.directory)
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_directory(path.parent)

    def delete(self, owner: str, name: str) -> None:
        """Delete a manifest for good.

        Raises
        ------
        StoreError
            ``unknown`` if it does not exist.
        """
        path = self.path(owner, name)
        try:
            path.unlink()
        except FileNotFoundError:
            raise StoreError(f"{owner} has nothing stored as {name}.", "unknown") from None
        sync_directory(path.parent)

    def sync(self) -> None:
        """Sync all directories, so that changes by other processes survive a loss of power."""
        for owner in self.directory.iterdir():
            sync_directory(owner)
        sync_directory(self.directory)
