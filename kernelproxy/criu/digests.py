"""Digests of mapped files, cached across processes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from typing import Any

from kernelproxy.common.untrusted import parse_json
from kernelproxy.native import libraries


class Digests:
    """Digests of files, cached across processes."""

    def __enter__(self) -> Digests:
        self._file = libraries.cache_directory().parent / "mapped-files.json"
        self._changed = False
        self._known: dict[str, list[Any]] = {}
        with suppress(OSError, ValueError):
            found = parse_json(self._file.read_text("utf-8"))
            self._known = found if isinstance(found, dict) else {}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._changed:
            return
        partial = self._file.with_name(f".{self._file.name}.{threading.get_native_id()}")
        with suppress(OSError):  # then they are computed again
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._known), "utf-8")
            partial.rename(self._file)

    def of(self, path: str, state: os.stat_result) -> str:
        """Return the digest of a file in the given state."""
        key = [state.st_size, state.st_ino, state.st_dev, state.st_mtime_ns, state.st_ctime_ns]
        known = self._known.get(path)
        if isinstance(known, list) and known[1:] == key and isinstance(known[0], str):
            return known[0]
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._known[path] = [digest, *key]
        self._changed = True
        return digest
