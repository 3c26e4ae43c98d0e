"""Libraries of ours, which are built once: found in the installed package, in the machine's
directory (`kernelproxy.native.machine_libraries`) or in the user's cache, and otherwise compiled
into that cache.

One process compiles; whoever needs the same meanwhile waits, and knows how far it is. Standard
library only: kernels use this module under their own interpreter.
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
#: Between two looks at how far another process is.
LOOK_SECONDS = 0.2

T = TypeVar("T")


@dataclass(frozen=True)
class Compiling:
    """Something is being compiled, by this process or by another one: a sentence for people.

    Parameters
    ----------
    what : str
        What it is for.
    done, total : int
        Units; no total while nobody knows it.
    """

    what: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        far = f", {self.done} of {self.total}" if self.total else ""
        return f"Compiling {self.what} (first use only){far}"


#: Told how far a compilation is, each time that this changes.
Message = Callable[[Compiling], object]
#: Builds into a cache; is passed what to tell how many of how many units are compiled.
Build = Callable[[Path, Tell], object]


def lines(say: Callable[[str], object]) -> Message:
    """Say, in one line, that something is being compiled; how far it is, is not said."""
    said: set[str] = set()

    def tell(compiling: Compiling) -> None:
        if compiling.what not in said:
            said.add(compiling.what)
            say(f"{replace(compiling, total=0)}.")

    return tell


def printer(stream: TextIO) -> Message:
    """Print how far a compilation is, on a terminal as one line that replaces itself."""
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
    """Find libraries in the package, the machine's directory or a cache; one process builds.

    Parameters
    ----------
    key : str
        Name of their directory.
    cache : Path, optional
        Where it is built; the user's cache by default, which need not be there for what is found.
    inside : callable
        Returns what is in a directory, or None if it is not whole.
    build : callable
        Builds them.
    what : str
        What they are for, for people.
    message : callable, optional
        Is told how far this is, here or in another process that builds the same.

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
    """What is in a directory of a cache, which nobody else may have filled."""
    try:
        check_inside(directory, f"remove {directory}")
    except ControlError as error:
        raise NativeError(error.message.rstrip(".")) from error
    return inside(directory)


@contextlib.contextmanager
def _locked(cache: Path, key: str, tell: Tell) -> Iterator[None]:
    """Hold the lock of a key: one process builds, the others wait, and tell how far that one is."""
    told: tuple[int, int] | None = None
    with (cache / f"{key}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                far = _noted(cache, key) or (0, 0)
                if far != told:
                    tell(*far)
                    told = far
                time.sleep(LOOK_SECONDS)
            else:
                break
        yield


@contextlib.contextmanager
def _noting(cache: Path, key: str, tell: Tell) -> Iterator[Tell]:
    """Note how far a build is for those who wait for it, and tell it."""
    file = _note(cache, key)
    partial = file.with_suffix(".tmp")  # only who holds the lock writes it

    def note(done: int, total: int) -> None:
        with contextlib.suppress(OSError):  # it only tells
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
    """How many of how many units are compiled by whoever holds the lock, if he has said so."""
    try:
        done, total = _note(cache, key).read_text("ascii").split()
        return int(done), int(total)
    except (OSError, ValueError):
        return None


def cache_directory() -> Path:
    """Where libraries that were built at first use are kept.

    Raises
    ------
    NativeError
        It cannot be made, or somebody else could have put libraries there.
    """
    try:
        return paths.cache_dir("native")
    except ControlError as error:
        raise NativeError(error.message.rstrip(".")) from error
    except OSError as error:
        raise NativeError(f"the native part cannot be kept in a cache: {error}") from error


def source_tree() -> Path:
    """The native sources: shipped in the package, or beside it in a checkout."""
    shipped = PACKAGE / "_native"
    return shipped if shipped.is_dir() else PACKAGE.parent / "native"


def is_checkout(tree: Path) -> bool:
    """Whether sources are those of a clone, whose users are developers."""
    return tree != PACKAGE / "_native"


def publish(
    cache: Path, key: str, build: Callable[[Path, Path], object], *, keep: bool = False
) -> None:
    """Build, and publish by renaming, so that a directory exists whole or not at all.

    Parameters
    ----------
    cache : Path
        Whose lock of this key the caller holds.
    key : str
        Name of the directory.
    build : callable
        Called with a directory for objects and with one that it fills.
    keep : bool
        Keep the objects for the next build.
    """
    # We hold the key's lock: whatever lies under this name was left by a build that was killed.
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
        if target.exists():  # without all of it inside, or we would not be here
            shutil.rmtree(target)
        staged.rename(target)


def prune(cache: Path) -> None:
    """Keep what was built or used last: a checkout makes another pair with every change."""

    def oldest(files: Iterable[Path], kept: int) -> list[Path]:
        return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[kept:]

    for file in oldest((cache / "objects").glob("*.o"), OBJECTS_KEPT):
        file.unlink(missing_ok=True)
    for lock in oldest(cache.glob("torch*.lock"), PAIRS_KEPT):
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
