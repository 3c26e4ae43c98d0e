"""Files of this kernel: gathered for a checkpoint and restored from one."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernelproxy.common import paths
from kernelproxy.common.errors import FileError
from kernelproxy.kernel.files.changed_files import (
    FileState,
    PathKind,
    PutBack,
    Skipped,
    changed,
    collect,
    gaps,
    put_back,
    read_into,
)
from kernelproxy.kernel.files.tracker import JOURNAL_VARIABLE, REASON_VARIABLE
from kernelproxy.kernel.namespace.types import Omission

#: Paths from checkpoints that were restored here: they belong to this notebook, too.
_inherited: set[Path] = set()


def gather() -> tuple[int, list[FileState], list[Omission]]:
    """Copy the files that the kernel has changed.

    Returns
    -------
    tuple
        Descriptor of a file with the contents of all regular files, one after the other, of which
        the caller takes ownership; the states of all files; and what is not among them.

    Raises
    ------
    OSError
        If there is no room for the copy.
    """
    raw = b""
    with contextlib.suppress(OSError):  # not tracked, or nothing was changed yet
        raw = Path(os.environ.get(JOURNAL_VARIABLE, os.devnull)).read_bytes()
    collected = collect({*changed(raw), *_inherited})
    skipped = [*collected.skipped, *gaps(raw)]
    with tempfile.TemporaryFile(prefix="sing-") as copy:
        states, end = [], 0
        for state in collected.states:
            if state.kind is PathKind.FILE:
                try:
                    state = read_into(state, copy.fileno(), end)
                except FileError as error:
                    skipped.append(Skipped(state.path, str(error)))
                    continue
                end += state.size
            states.append(state)
        os.ftruncate(copy.fileno(), end)  # a failed copy may have left bytes at the end
        fd = os.dup(copy.fileno())
    omitted = [Omission(str(each.path), each.why) for each in skipped]
    if reason := os.environ.get(REASON_VARIABLE):
        omitted.append(Omission("files", f"they are not tracked: {reason}"))
    return fd, states, omitted


def inherit(states: Iterable[FileState]) -> None:
    """Called in a restored process: its files are in the original process's journal."""
    _inherited.update(state.path for state in states)


def described(states: Iterable[FileState]) -> list[dict[str, Any]]:
    """Return the states of files as JSON."""
    return [asdict(state) | {"path": str(state.path), "kind": str(state.kind)} for state in states]


def put_in_place(name: str, raw: Sequence[dict[str, Any]], fd: int) -> PutBack:
    """Restore files to their state in a checkpoint; keep aside what they replace.

    Parameters
    ----------
    name : str
        Name of the checkpoint.
    raw : sequence of dict
        See `described`; not trusted.
    fd : int
        Contents, see `gather`; the caller remains the owner.
    """
    states = [
        FileState(
            Path(str(each["path"])),
            PathKind(each["kind"]),
            int(each["mode"]),
            int(each["mtime_ns"]),
            int(each["size"]),
            str(each["target"]),
        )
        for each in raw
    ]
    offsets, end = {}, 0
    for state in states:
        if state.kind is PathKind.FILE:
            offsets[state.path] = end
            end += state.size

    @contextlib.contextmanager
    def content(state: FileState) -> Iterator[Iterator[bytes]]:
        yield _pieces(fd, offsets[state.path], state.size)

    aside = paths.data_dir() / "aside" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    done = put_back(states, content, aside)
    _inherited.update(state.path for state in states)
    return done


def _pieces(fd: int, offset: int, count: int) -> Iterator[bytes]:
    while count:
        piece = os.pread(fd, min(count, 1 << 20), offset)
        if not piece:
            raise FileError("the checkpoint has less of it than it says")
        yield piece
        offset, count = offset + len(piece), count - len(piece)


def mapped(fd: int) -> mmap.mmap | None:
    """Map a file privately: writes do not reach the file; None if it is empty."""
    count = os.fstat(fd).st_size
    if not count:
        return None
    return mmap.mmap(fd, count, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def write_all(fd: int, data: memoryview) -> None:
    """Write all bytes of `data`."""
    while data:
        data = data[os.write(fd, data) :]
