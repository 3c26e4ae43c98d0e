"""Lookup and build of the project's native libraries, each of which is built once.

They are looked up in the installed package, in the machine's directory
(`kernelproxy.native.machine_libraries`) and in the user's cache, and are otherwise compiled into
that cache. One process compiles; other processes that need the same libraries wait, and see its
progress. Standard library only: kernels use this module under their own interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypeVar

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, NativeError
from kernelproxy.common.ownership import check_inside
from kernelproxy.native import machine_libraries
from kernelproxy.native.compiler import Tell

PACKAGE = Path(__file__).resolve().parents[1]
OBJECTS_KEPT = 200
PAIRS_KEPT = 8
#: Interval for polling the progress of another process.
POLL_SECONDS = 0.2

T = TypeVar("T")


@dataclass(frozen=True)
class Compiling:
    """Progress of a compilation in this process or another one; as text, a user-facing sentence.

    Parameters
    ----------
    what : str
        Purpose of the libraries.
    done, total : int
        Compilation units; `total` is 0 while it is unknown.
    """

    what: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        far = f", {self.done} of {self.total}" if self.total else ""
        return f"Compiling {self.what} (first use only){far}"


#: Callback for the progress of a compilation, called at each change.
Message = Callable[[Compiling], object]
#: Builds into a cache; receives a callback for the number of compiled units and their total.
Build = Callable[[Path, Tell], object]


def lines(say: Callable[[str], object]) -> Message:
    """Return a callback that reports each compilation once, in one line, without its progress."""
    announced: set[str] = set()

    def tell(compiling: Compiling) -> None:
        if compiling.what not in announced:
            announced.add(compiling.what)
            say(f"{replace(compiling, total=0)}.")

    return tell


def printer(stream: TextIO) -> Message:
    """Return a callback that prints progress; on a terminal, one line that is overwritten."""
    if not stream.isatty():
        return lines(lambda line: print(line, file=stream, flush=True))

    def tell(compiling: Compiling) -> None:
        whole = 0 < compiling.total <= compiling.done
        print(f"\r{compiling}.\x1b[K", end="\n" if whole else "", file=stream, flush=True)

    return tell


def find_or_build(
    key: str,
    cache: Path | None,
    inside: Callable[[Path], T | None],
    build: Build,
    what: str,
    message: Message | None = None,
) -> T:
    """Find libraries in the package, the machine's directory or a cache; else build them there.

    Parameters
    ----------
    key : str
        Name of their directory.
    cache : Path, optional
        Directory of builds; by default the user's cache, which is only needed if the libraries are
        not found elsewhere.
    inside : callable
        Returns the libraries in a directory, or None if it is incomplete.
    build : callable
        Builds them.
    what : str
        User-facing purpose of the libraries.
    message : callable, optional
        Receives the progress of the build, in this process or in another one that builds the same.

    Raises
    ------
    NativeError
        They cannot be built here.
    """
    if found := inside(PACKAGE / "_native_lib" / key):
        return found
    if found := machine_libraries.inside(key, inside):
        return found
    cache = cache or cache_directory()
    if found := _safe(cache / key, inside):
        return found

    def tell(done: int, total: int) -> None:
        if message is not None:
            message(Compiling(what, done, total))

    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(cache, key, tell):
            if found := _safe(cache / key, inside):
                return found
            with _noting(cache, key, tell) as note:
                build(cache, note)
            if found := inside(cache / key):
                return found
    except OSError as error:
        raise NativeError(f"the native part cannot be built in {cache}: {error}") from error
    raise NativeError(f"the build left no libraries in {cache / key}")


def _safe(directory: Path, inside: Callable[[Path], T | None]) -> T | None:
    """Return the libraries in a cache directory, after a check that no other user wrote them."""
    try:
        check_inside(directory, f"remove {directory}")
    except ControlError as error:
        raise NativeError(error.message.rstrip(".")) from error
    return inside(directory)


@contextlib.contextmanager
def _locked(cache: Path, key: str, tell: Tell) -> Iterator[None]:
    """Hold the lock of a key: one process builds; the others wait, and report its progress."""
    shown: tuple[int, int] | None = None
    with (cache / f"{key}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                far = _noted(cache, key) or (0, 0)
                if far != shown:
                    tell(*far)
                    shown = far
                time.sleep(POLL_SECONDS)
            else:
                break
        yield


@contextlib.contextmanager
def _noting(cache: Path, key: str, tell: Tell) -> Iterator[Tell]:
    """Yield a callback that reports a build's progress, also to waiting processes, by a file."""
    file = _note(cache, key)
    partial = file.with_suffix(".tmp")  # only the lock's holder writes it

    def note(done: int, total: int) -> None:
        with contextlib.suppress(OSError):  # progress is not essential
            partial.write_text(f"{done} {total}", "ascii")
            partial.rename(file)
        tell(done, total)

    try:
        yield note
    finally:
        for each in (partial, file):
            each.unlink(missing_ok=True)


def _note(cache: Path, key: str) -> Path:
    return cache / f"{key}.progress"


def _noted(cache: Path, key: str) -> tuple[int, int] | None:
    """Return the units that the lock's holder has compiled, and their total; None if unknown."""
    try:
        done, total = _note(cache, key).read_text("ascii").split()
        return int(done), int(total)
    except (OSError, ValueError):
        return None


def cache_directory() -> Path:
    """Return the cache of libraries that were built at first use.

    Raises
    ------
    NativeError
        It cannot be created, or another user could have put libraries there.
    """
    try:
        return paths.cache_dir("native")
    except ControlError as error:
        raise NativeError(error.message.rstrip(".")) from error
    except OSError as error:
        raise NativeError(f"the native part cannot be kept in a cache: {error}") from error


def source_tree() -> Path:
    """Return the directory of the native sources: in the package, or next to it in a checkout."""
    shipped = PACKAGE / "_native"
    return shipped if shipped.is_dir() else PACKAGE.parent / "native"


def is_checkout(tree: Path) -> bool:
    """True if the sources are those of a checkout, whose users are developers."""
    return tree != PACKAGE / "_native"


def publish(
    cache: Path, key: str, build: Callable[[Path, Path], object], *, keep: bool = False
) -> None:
    """Build, and publish by a rename, so that the directory is complete or does not exist.

    Parameters
    ----------
    cache : Path
        Its parent. The caller holds the lock of this key.
    key : str
        Name of the directory.
    build : callable
        Called with a directory for objects, and with the directory to fill.
    keep : bool
        Keep the objects for the next build.
    """
    # The caller holds the key's lock, so files with this name are of a build that was killed.
    for stale in cache.glob(f".{key}.*"):
        shutil.rmtree(stale, ignore_errors=True)  # its compilers may still write there
    with tempfile.TemporaryDirectory(prefix=f".{key}.", dir=cache) as name:
        scratch = Path(name)
        objects = cache / "objects" if keep else scratch / "objects"
        objects.mkdir(exist_ok=True)
        staged = scratch / "libraries"
        staged.mkdir()
        build(objects, staged)
        target = cache / key
        if target.exists():  # it is incomplete, or it would have been used
            shutil.rmtree(target)
        staged.rename(target)


def prune(cache: Path) -> None:
    """Remove all but the most recent builds: a checkout makes a new pair with every change."""

    def oldest(files: Iterable[Path], kept: int) -> list[Path]:
        return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[kept:]

    for file in oldest((cache / "objects").glob("*.o"), OBJECTS_KEPT):
        file.unlink(missing_ok=True)
    for lock in oldest(cache.glob("torch*.lock"), PAIRS_KEPT):
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
