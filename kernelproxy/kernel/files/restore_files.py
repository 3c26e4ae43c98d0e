"""Restoring files. If the process is killed at any moment, each file is either old or restored.

The states come from a checkpoint, which could have been tampered with, and the directories may have
changed since. So every directory is entered by its descriptor without following links, and every
operation is relative to that descriptor. Nothing is written through a link, over another user's
file, or into a computer's system directories.

A file in the way is kept aside first, by a hard link to it where possible. Then the new file
replaces it by one rename.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from kernelproxy.common.errors import SingError
from kernelproxy.kernel.files.file_state import (
    MODE_MASK,
    PART_PREFIX,
    SYSTEM,
    FileState,
    PathKind,
    Skipped,
    special_kind,
)

Content = Callable[[FileState], AbstractContextManager[Iterable[bytes]]]

ASIDE_MAX = 1000  # copies of one file
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EARLIEST, _LATEST = -(1 << 62), 1 << 62  # nanoseconds that the kernel takes


@dataclass
class PutBack:
    """Outcome for each path.

    Parameters
    ----------
    restored : list of Path
        Restored to their state in the checkpoint.
    kept_aside : dict of Path to Path
        New places of what was there before.
    unchanged : list of Path
        Already in their state in the checkpoint; not touched.
    problems : list of Skipped
        Left as they are, with the reason.
    """

    restored: list[Path] = field(default_factory=list)
    kept_aside: dict[Path, Path] = field(default_factory=dict)
    unchanged: list[Path] = field(default_factory=list)
    problems: list[Skipped] = field(default_factory=list)


def put_back(states: Iterable[FileState], content: Content, aside: Path) -> PutBack:
    """Restore paths to their state in a checkpoint.

    The call may be killed at any moment and repeated: each file is complete, old or new, and files
    restored before count as unchanged. Two calls for the same paths must not run concurrently.

    Parameters
    ----------
    states : iterable of FileState
        From `collect`, perhaps on another host. They are not trusted.
    content : callable
        Returns a context manager whose value yields the bytes of a file, in pieces; called up to
        twice for each file, to compare and to write.
    aside : Path
        Directory for files that are in the way, created if needed: ``/a/b`` is kept there as
        ``a/b``. A directory on another file system stays beside its old name instead.

    Returns
    -------
    PutBack
        An error with one file, also one that `content` raises as a `SingError`, is in its
        `problems`; the other files are restored nevertheless.
    """
    putting = _Putting(content, aside)
    wanted: dict[PathKind, list[FileState]] = {kind: [] for kind in PathKind}
    for state in states:
        with putting.reporting(state):
            check(state)
            wanted[state.kind].append(state)
    deepest_first: Callable[[FileState], int] = lambda state: -len(state.path.parts)  # noqa: E731
    directories = sorted(wanted[PathKind.DIRECTORY], key=deepest_first)
    steps = [
        *((state, putting.absent) for state in sorted(wanted[PathKind.ABSENT], key=deepest_first)),
        *((state, putting.directory) for state in reversed(directories)),
        *((state, putting.file) for state in wanted[PathKind.FILE]),
        *((state, putting.symlink) for state in wanted[PathKind.SYMLINK]),
        # Last: a directory without write permission could not be filled.
        *((state, putting.directory_mode) for state in directories),
    ]
    for state, step in steps:
        with putting.reporting(state):
            step(state)
    putting.sync()
    return putting.report


class RefusalError(Exception):
    """Path that is left as it is; the text is the reason, half a sentence that follows the path."""


class BehindLinkError(RefusalError):
    """Path with a directory that is a symbolic link now, so nothing has that path itself."""


def check(state: FileState) -> None:
    """Check that a state is valid.

    Raises
    ------
    RefusalError
        It is not valid, or its path is one that checkpoints exclude.
    """
    path = str(state.path)
    is_plain = path.startswith("/") and not path.startswith("//") and "\0" not in path
    if not is_plain or path != os.path.normpath(path) or path == "/":
        raise RefusalError("is not an absolute path to a file")
    if any(state.path.is_relative_to(system) for system in SYSTEM):
        raise RefusalError("belongs to the system")
    if state.kind not in set(PathKind):
        raise RefusalError("is of a kind that this version does not know")
    if state.kind == PathKind.SYMLINK and (not state.target or "\0" in state.target):
        raise RefusalError("is a link to nowhere")
    if state.size < 0 or not _EARLIEST < state.mtime_ns < _LATEST:
        raise RefusalError("has an impossible size or time")


class _Putting:
    """State of one call of `put_back`."""

    def __init__(self, content: Content, aside: Path) -> None:
        self.report = PutBack()
        self._content, self._aside = content, aside
        self._done: set[Path] = set()  # paths that need no more steps
        self._touched: set[Path] = set()  # directories

    @contextlib.contextmanager
    def reporting(self, state: FileState) -> Iterator[None]:
        """Record the error of one path."""
        try:
            yield
        except RefusalError as error:
            self._problem(state.path, str(error))
        except SingError as error:
            self._problem(state.path, f"cannot be read from the checkpoint: {error}")
        except OSError as error:
            self._problem(state.path, f"cannot be restored: {error.strerror or error}")

    def _problem(self, path: Path, why: str) -> None:
        self._done.add(path)
        self.report.problems.append(Skipped(path, why))

    def _unchanged(self, path: Path) -> None:
        self._done.add(path)
        self.report.unchanged.append(path)

    def sync(self) -> None:
        """Make renames survive a loss of power. File systems keep their order anyway."""
        for directory in sorted(self._touched):
            with contextlib.suppress(OSError):
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    # ---------------------------------------------------------------- kinds

    def absent(self, state: FileState) -> None:
        """Remove what is at the path; keep a file aside."""
        try:
            with _entered(state.path, make=False) as directory:
                found = _lstat(directory, state.path)
                if found is None:
                    self._unchanged(state.path)
                    return
                if stat.S_ISDIR(found.st_mode):
                    self._remove_directory(directory, state.path)
                else:
                    self._keep(directory, state.path, found)
                    os.unlink(state.path.name, dir_fd=directory)
                self._touched.add(state.path.parent)
        except (FileNotFoundError, NotADirectoryError, BehindLinkError):
            self._unchanged(state.path)
            return
        self.report.restored.append(state.path)

    def _remove_directory(self, directory: int, path: Path) -> None:
        try:
            os.rmdir(path.name, dir_fd=directory)
        except OSError as error:
            # The kernel may not have created all of these files.
            raise RefusalError("is a directory with files now; it stays as it is") from error

    def directory(self, state: FileState) -> None:
        """Create a directory, without its mode."""
        with _entered(state.path, make=True) as directory:
            found = _lstat(directory, state.path, is_directory_ours=False)
            if found is not None and stat.S_ISDIR(found.st_mode):
                if found.st_uid != os.geteuid() or found.st_mode & MODE_MASK == state.mode:
                    self._unchanged(state.path)
                return
            if found is not None:
                self._keep(directory, state.path, found)
                os.unlink(state.path.name, dir_fd=directory)
            os.mkdir(state.path.name, 0o700, dir_fd=directory)
            self._touched.add(state.path.parent)

    def directory_mode(self, state: FileState) -> None:
        """Set the directory's mode."""
        if state.path in self._done:
            return
        with _entered(state.path, make=False) as directory:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(state.path.name, flags, dir_fd=directory)
            try:
                os.fchmod(fd, state.mode & MODE_MASK)
            finally:
                os.close(fd)
        self.report.restored.append(state.path)

    def file(self, state: FileState) -> None:
        """Write a file, unless it is unchanged."""
        with _entered(state.path, make=True) as directory:
            part = _part_of(directory, state.path)
            found = _lstat(directory, state.path)
            if found is not None and self._is_same(directory, state, found):
                self._only_mode(directory, state, found)
                return
            try:
                self._write(directory, part, state)
                self._replace(directory, state.path, part, found)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=directory)
                raise

    def symlink(self, state: FileState) -> None:
        """Create a link, unless it is unchanged."""
        with _entered(state.path, make=True) as directory:
            part = _part_of(directory, state.path)
            found = _lstat(directory, state.path)
            is_link = found is not None and stat.S_ISLNK(found.st_mode)
            if is_link and os.readlink(state.path.name, dir_fd=directory) == state.target:
                self._unchanged(state.path)
                return
            os.symlink(state.target, part, dir_fd=directory)
            self._replace(directory, state.path, part, found)

    # ---------------------------------------------------------------- content

    def _is_same(self, directory: int, state: FileState, found: os.stat_result) -> bool:
        """True if a file has the content of its state."""
        if not stat.S_ISREG(found.st_mode) or found.st_size != state.size:
            return False
        fd = os.open(state.path.name, _reading(), dir_fd=directory)
        with open(fd, "rb", buffering=0) as file, self._content(state) as pieces:
            for piece in pieces:
                if _read(file.fileno(), len(piece)) != piece:
                    return False
            return file.read(1) == b""

    def _only_mode(self, directory: int, state: FileState, found: os.stat_result) -> None:
        if found.st_mode & MODE_MASK == state.mode & MODE_MASK:
            self._unchanged(state.path)
            return
        # Not by opening the file, which its current mode may forbid.
        os.chmod(state.path.name, state.mode & MODE_MASK, dir_fd=directory)
        self.report.restored.append(state.path)

    def _write(self, directory: int, part: str, state: FileState) -> None:
        """Write a complete file under a temporary name, and sync it to disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(part, flags, 0o600, dir_fd=directory)
        try:
            count = 0
            with self._content(state) as pieces:
                for piece in pieces:
                    _write(fd, piece)
                    count += len(piece)
            if count != state.size:
                raise RefusalError(f"has {count} bytes in the checkpoint instead of {state.size}")
            os.fchmod(fd, state.mode & MODE_MASK)
            os.utime(fd, ns=(state.mtime_ns, state.mtime_ns))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _replace(self, directory: int, path: Path, part: str, found: os.stat_result | None) -> None:
        """Rename a file from its temporary name to its path."""
        if found is not None:
            self._keep(directory, path, found)
        os.rename(part, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        self._touched.add(path.parent)
        self.report.restored.append(path)

    # ---------------------------------------------------------------- aside

    def _keep(self, directory: int, path: Path, found: os.stat_result) -> None:
        """Keep aside what is at a path: move a directory, link or copy anything else."""
        base = self._aside / path.relative_to("/")
        base.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(ASIDE_MAX):
            suffix = f"~{number}" if number else ""
            place = base.with_name(base.name + suffix)
            if stat.S_ISDIR(found.st_mode):
                kept = _move_directory(directory, path, place, suffix)
            elif stat.S_ISLNK(found.st_mode):
                kept = place if _keep_link(directory, path, place) else None
            else:
                kept = place if _keep_file(directory, path, place, found) else None
            if kept is not None:
                self.report.kept_aside[path] = kept
                self._touched.add(kept.parent)
                return
        raise RefusalError(f"has {ASIDE_MAX} copies in {self._aside} already; it stays as it is")


def _keep_file(directory: int, path: Path, place: Path, found: os.stat_result) -> bool:
    """Keep a file by a hard link or a copy; return False if another file has that name."""
    if os.path.lexists(place):
        was_kept = not place.is_symlink() and place.is_file()
        return was_kept and (
            os.path.samestat(place.stat(), found) or _equal(directory, path, place)
        )
    try:
        os.link(path.name, place, src_dir_fd=directory, follow_symlinks=False)
    except OSError:  # another file system, or one without hard links
        fd = os.open(path.name, _reading(), dir_fd=directory)
        part = place.with_name(_part(place.name))
        with open(fd, "rb") as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fchmod(target.fileno(), stat.S_IMODE(found.st_mode) & MODE_MASK)
            os.utime(target.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(target.fileno())
        part.rename(place)
    return True


def _equal(directory: int, path: Path, place: Path) -> bool:
    """True if an earlier call, which was killed, has kept the same content."""
    return filecmp.cmp(f"/proc/self/fd/{directory}/{path.name}", place, shallow=False)


def _keep_link(directory: int, path: Path, place: Path) -> bool:
    """Create a copy of a symbolic link; return False if something else is there."""
    target = os.readlink(path.name, dir_fd=directory)
    if os.path.lexists(place):
        return place.is_symlink() and os.readlink(place) == target
    os.symlink(target, place)
    return True


def _move_directory(directory: int, path: Path, place: Path, suffix: str) -> Path | None:
    """Move a directory; return None if that name exists."""
    if os.path.lexists(place):
        return None
    try:
        os.rename(path.name, place, src_dir_fd=directory)
    except OSError:  # another file system: copying would not be atomic
        beside = path.with_name(f"{path.name}.aside{suffix}")
        if _lstat(directory, beside) is not None:
            return None
        os.rename(path.name, beside.name, src_dir_fd=directory, dst_dir_fd=directory)
        return beside
    return place


# ---------------------------------------------------------------- directories by descriptor


@contextlib.contextmanager
def _entered(path: Path, *, make: bool) -> Iterator[int]:
    """Open the directory of a path, from the root without following a link."""
    fd = os.open("/", _DIRECTORY)
    try:
        here = Path("/")
        for name in path.parts[1:-1]:
            here /= name
            following = _enter(fd, name, here, make=make)
            os.close(fd)
            fd = following
        yield fd
    finally:
        os.close(fd)


def _enter(fd: int, name: str, here: Path, *, make: bool) -> int:
    """Open a directory inside another one."""
    try:
        try:
            return os.open(name, _DIRECTORY, dir_fd=fd)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=fd)
        return os.open(name, _DIRECTORY, dir_fd=fd)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=fd).st_mode):
            raise BehindLinkError(f"lies behind a symbolic link now, {here}") from None
        if make:
            raise RefusalError(f"has no directory: {here} is a file now") from None
        raise


def _lstat(directory: int, path: Path, *, is_directory_ours: bool = True) -> os.stat_result | None:
    """Return the status of a path, None if it does not exist.

    Raises
    ------
    RefusalError
        If it is of a kind that is never restored, or belongs to another user.
    """
    try:
        found = os.lstat(path.name, dir_fd=directory)
    except FileNotFoundError:
        return None
    if special := special_kind(found.st_mode):
        raise RefusalError(f"is {special} now; it stays as it is")
    must_be_ours = is_directory_ours or not stat.S_ISDIR(found.st_mode)
    if must_be_ours and found.st_uid != os.geteuid():
        raise RefusalError("belongs to another user now; it stays as it is")
    return found


def _part(name: str) -> str:
    """Return a file's temporary name: a fixed one, so that the next call removes a leftover."""
    return f"{PART_PREFIX}{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.part"


def _part_of(directory: int, path: Path) -> str:
    """Return the temporary name of a path; remove what a killed call has left under it."""
    part = _part(path.name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=directory)
    return part


def _reading() -> int:
    return os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _read(fd: int, count: int) -> bytes:
    """Read a number of bytes, or to the end."""
    pieces = []
    while count:
        piece = os.read(fd, count)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _write(fd: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]
