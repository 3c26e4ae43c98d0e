"""Files that a kernel has changed: listed, described, read, and restored.

    changed(journal)          the paths that the tracker (`native/fstrack`) has recorded
    collect(paths, limits)    their current state, without what is too large or not ours to keep
    read_into(state, fd)      the consistent content of one
    put_back(states, ...)     on a restore: restores that state, and keeps aside what it replaces

What is tracked and what is not is in docs/files.md. Standard library only: any side may use it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kernelproxy.common.errors import FileError
from kernelproxy.common.units import bytes_text
from kernelproxy.kernel.files.file_state import (
    MODE_MASK,
    Exclusion,
    FileLimits,
    FileState,
    PathKind,
    Skipped,
    default_exclusions,
    special_kind,
)
from kernelproxy.kernel.files.restore_files import Content, PutBack, put_back

__all__ = [
    "CollectedFiles",
    "Content",
    "FileLimits",
    "FileState",
    "PathKind",
    "PutBack",
    "Skipped",
    "changed",
    "collect",
    "default_exclusions",
    "gaps",
    "put_back",
    "read_into",
]  # fmt: skip

# As in native/fstrack/journal.h.
JOURNAL_BYTES_MAX = 64 << 20

BUFFER_BYTES = 1 << 20
ATTEMPTS = 3

_NOTE = re.compile(rb"\0([^\0]{2,})//(?![^\0])")
_OPENED = re.compile(rb"=(\d{1,20}):(\d{1,20})(/.*)", re.DOTALL)


# ---------------------------------------------------------------- the journal


def changed(journal: bytes) -> list[Path]:
    """List the paths that a kernel has changed, in the order in which it did so first.

    Parameters
    ----------
    journal : bytes
        Content of the tracker's journal. Truncated notes are ignored.

    Returns
    -------
    list of Path
        Resolved when they were recorded. A file that was opened for writing, but not created or
        truncated by that, is listed only if it differs now from what it was then.
    """
    certain: dict[bytes, bool] = {}
    for note in _notes(journal):
        if note.startswith(b"/"):
            certain[note] = True
        elif found := _OPENED.fullmatch(note):
            path = found[3]
            is_changed = certain.get(path, False)
            certain[path] = is_changed or _differs(path, int(found[1]), int(found[2]))
    return [Path(os.fsdecode(path)) for path, is_changed in certain.items() if is_changed]


def gaps(journal: bytes) -> list[Skipped]:
    """Return what the tracker could not record, as user-facing texts."""
    found = {note[1:] for note in _notes(journal) if note.startswith(b"?/")}
    skipped = [
        Skipped(Path(os.fsdecode(path)), "was renamed, and not everything below it is tracked")
        for path in sorted(found)
    ]
    if len(journal) >= JOURNAL_BYTES_MAX:
        why = (
            f"(all files): changes are no longer tracked after {bytes_text(len(journal))} of notes"
        )
        skipped.append(Skipped(Path("/"), why))
    return skipped


def _notes(journal: bytes) -> Iterable[bytes]:
    """Return the complete notes."""
    return (found[1] for found in _NOTE.finditer(journal))


def _differs(path: bytes, mtime_ns: int, size: int) -> bool:
    """True if a file has changed."""
    try:
        found = os.lstat(path)
    except OSError:
        return True
    return (found.st_mtime_ns, found.st_size) != (mtime_ns, size)


# ---------------------------------------------------------------- collecting


@dataclass
class CollectedFiles:
    """State of paths.

    Parameters
    ----------
    states : list of FileState
        Ordered by path.
    skipped : list of Skipped
        Paths that are missing in `states` although they are not excluded.
    excluded : int
        Number of excluded paths.
    """

    states: list[FileState] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    excluded: int = 0

    @property
    def total_bytes(self) -> int:
        """Total size of all files."""
        return sum(state.size for state in self.states)


def collect(paths: Iterable[Path], limits: FileLimits | None = None) -> CollectedFiles:
    """Describe the files at the paths, as far as a checkpoint includes them.

    If the files exceed the limit together, the largest are left out. The server saves the notebook
    itself, so it is not among a kernel's files. If a kernel has written it, add its path to the
    exclusions: restoring it would overwrite what the user sees in the browser.

    Parameters
    ----------
    paths : iterable of Path
        From `changed`, and those of an earlier checkpoint from which the kernel was restored.
    limits : Limits, optional
    """
    limits = limits or FileLimits()
    excluded, links, collected = Exclusion(limits.exclude), _Links(), CollectedFiles()
    states: list[FileState] = []
    for path in sorted(set(paths)):
        if path in excluded:
            collected.excluded += 1
            continue
        try:
            found = links.resolved(path)
        except _SkipError as error:
            collected.skipped.append(Skipped(path, str(error)))
            continue
        if found.kind == PathKind.ABSENT and any(map(path.is_relative_to, limits.temporary)):
            collected.excluded += 1
        elif found.size > limits.file_bytes:
            size, most = bytes_text(found.size), bytes_text(limits.file_bytes)
            collected.skipped.append(Skipped(path, f"has {size}; files over {most} are not saved"))
        else:
            states.append(found)
    _cut(states, limits, collected)
    collected.states.sort(key=lambda state: state.path)
    return collected


def _cut(states: list[FileState], limits: FileLimits, collected: CollectedFiles) -> None:
    """Take the smallest files, as long as there is room."""
    total = 0
    states.sort(key=lambda state: (state.size, state.path))
    for state in states[: limits.count]:
        total += state.size
        if total > limits.total_bytes:
            size, most = bytes_text(state.size), bytes_text(limits.total_bytes)
            why = f"has {size}; with it, files would take more than {most}"
            collected.skipped.append(Skipped(state.path, why))
        else:
            collected.states.append(state)
    rest = states[limits.count :]
    if rest:
        why = f"and {len(rest) - 1} more are not saved: a checkpoint takes {limits.count} paths"
        collected.skipped.append(Skipped(rest[0].path, why))


class _SkipError(Exception):
    """Path that cannot be included; the text says why."""


class _Links:
    """Reads the state of paths; caches which directories are free of links."""

    def __init__(self) -> None:
        self._plain: dict[Path, bool] = {}

    def resolved(self, path: Path) -> FileState:
        """Return the state of a path."""
        if not path.is_absolute() or ".." in path.parts:
            raise _SkipError("is not an absolute path")
        parent = path.parent
        if parent not in self._plain:
            self._plain[parent] = os.path.realpath(parent) == str(parent)
        if not self._plain[parent]:
            raise _SkipError("lies behind a symbolic link now")
        try:
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                return FileState(path, PathKind.SYMLINK, target=os.readlink(path))
        except (FileNotFoundError, NotADirectoryError):
            return FileState(path, PathKind.ABSENT)
        except OSError as error:
            raise _SkipError(f"cannot be looked at: {error.strerror}") from error
        if special := special_kind(found.st_mode):
            raise _SkipError(f"is {special}")
        if found.st_uid != os.geteuid():
            raise _SkipError("belongs to another user")
        if stat.S_ISDIR(found.st_mode):
            return FileState(path, PathKind.DIRECTORY, found.st_mode & MODE_MASK)
        return FileState.of(path, found)


def read_into(
    state: FileState, fd: int, offset: int = 0, *, bytes_max: int | None = None
) -> FileState:
    """Copy a file's content consistently, as of one moment.

    Parameters
    ----------
    state : FileState
        From `collect`.
    fd : int
        File to write to; after an error its content from `offset` on is undefined.
    offset : int
        Where to write in `fd`.
    bytes_max : int, optional
        Maximum size; default: no limit.

    Returns
    -------
    FileState
        State of the file at that moment, which may be later than `state`.

    Raises
    ------
    FileError
        If it cannot be read, is no longer a regular file, is too large, or keeps changing.
    """
    path = state.path
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        for _ in range(ATTEMPTS):
            before = os.fstat(source)
            if not stat.S_ISREG(before.st_mode):
                raise FileError(f"{path} is no file any more.")
            if bytes_max is not None and before.st_size > bytes_max:
                raise FileError(f"{path} has grown to {bytes_text(before.st_size)}.")
            count = _copy(source, fd, offset, before.st_size)
            if count == before.st_size and _moment(os.fstat(source)) == _moment(before):
                return FileState.of(path, before)
    except OSError as error:
        raise FileError(f"{path} cannot be copied: {error.strerror}.") from error
    finally:
        os.close(source)
    raise FileError(f"{path} changed each time it was read; it is not saved.")


def _moment(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _copy(source: int, target: int, offset: int, size: int) -> int:
    """Copy up to `size` bytes; return the number of bytes copied."""
    buffer, done = memoryview(bytearray(min(BUFFER_BYTES, size) or 1)), 0
    while done < size:
        count = os.preadv(source, [buffer[: size - done]], done)
        if count == 0:
            break
        written = 0
        while written < count:
            written += os.pwrite(target, buffer[written:count], offset + done + written)
        done += count
    return done
