"""Open files: reopened at their position, if they are files that will still exist.

Their content is not saved here; another module restores files. Reopening truncates nothing.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from typing import Any

from kernelproxy.kernel.namespace import rebuild
from kernelproxy.kernel.namespace.types import Reduced, Unsaveable

CHUNK_BYTES = 1 << 20


def rule(kind: type) -> Callable[[Any], Reduced] | None:
    """Return the reducer for objects of a type, or None if it is not a file."""
    if kind is io.TextIOWrapper:
        return _text
    if kind in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom):
        return _buffered
    if kind is io.FileIO:
        return _raw
    return None


def _raw(file: io.FileIO) -> Reduced:
    if file.closed:
        return rebuild.closed_file, ("FileIO", str(file.name), file.mode, None)
    path = _path(file)
    flags = os.O_RDWR if "+" in file.mode else os.O_RDONLY if "r" in file.mode else os.O_WRONLY
    if "a" in file.mode:
        flags |= os.O_APPEND
    mode = file.mode.replace("x", "w")
    return rebuild.raw_file, (
        path, os.fsdecode(file.name), flags, mode.replace("b", ""), file.tell(),
    )  # fmt: skip


def _buffered(file: Any) -> Reduced:
    if file.closed:
        return rebuild.closed_file, (type(file).__name__, str(file.name), file.mode, None)
    _path(file.raw)  # refuse a pipe before using it
    if file.writable():
        file.flush()
    return rebuild.buffered_file, (type(file), file.raw, file.tell())


def _text(file: io.TextIOWrapper) -> Reduced:
    if file.closed:
        return rebuild.closed_file, ("TextIOWrapper", str(file.name), file.mode, file.encoding)
    _path(file)
    if file.writable():
        file.flush()
    try:
        cookie = file.tell()
    except OSError:
        raise Unsaveable("a file in the middle of a loop over its lines") from None
    # The object does not expose how it treats line ends; that only matters for others than
    # "\n".
    if file.readable() and _has_returns(str(file.name)):
        raise Unsaveable("an open text file with carriage returns")
    how = (file.line_buffering, file.write_through)
    return rebuild.text_file, (
        file.buffer, file.mode, file.encoding, file.errors, None, how, cookie,
    )  # fmt: skip


def _path(file: Any) -> str:
    """Return the absolute path of an open file.

    Raises
    ------
    Refused
        If another process could not open it.
    """
    name = file.name
    if isinstance(name, int):
        raise Unsaveable("a file without a name")
    path = os.path.abspath(os.fsdecode(name))
    here = os.fstat(file.fileno())
    if not stat.S_ISREG(here.st_mode):
        raise Unsaveable("an open pipe, terminal or device")
    try:
        there = os.stat(path)
    except OSError:
        raise Unsaveable(f"an open file that is deleted, {path}") from None
    if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
        raise Unsaveable(f"an open file that was replaced, {path}")
    return path


def _has_returns(path: str) -> bool:
    with open(path, "rb") as file:
        return any(b"\r" in chunk for chunk in iter(lambda: file.read(CHUNK_BYTES), b""))
