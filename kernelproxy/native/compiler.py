"""Compiler driver for the project's C++: parallel, with objects cached by source and flags.

Standard library only: kernels use this module under their own interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kernelproxy.common.errors import NativeError

COMPILE_SECONDS = 1200
#: Maximum memory of one compiler with torch's headers.
COMPILER_BYTES = 900 << 20
#: Compiling a header in advance takes as long as it saves in about this many units.
PRECOMPILED_UNITS = 4
MEMINFO = Path("/proc/meminfo")

COMPILE_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-pthread")
SANITIZE_FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined")
# GCC's warning about uninitialised values is often wrong for torch's inlined headers.
STRICT_FLAGS = ("-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized")

#: Callback: number of compiled units, and their total.
Tell = Callable[[int, int], object]


def sources(tree: Path, parts: Iterable[str], suffixes: Sequence[str]) -> list[Path]:
    files = (file for part in parts for file in (tree / part).rglob("*"))
    return sorted(file for file in files if file.suffix in suffixes)


def hash_of(tree: Path, parts: Iterable[str], how: object) -> str:
    """Return a hash of sources and of how they are compiled.

    Raises
    ------
    NativeError
        There are no sources.
    """
    digest = hashlib.sha256(repr(how).encode())
    files = sources(tree, parts, (".h", ".cpp"))
    for file in files:
        digest.update(f"\0{file.relative_to(tree)}\0".encode() + file.read_bytes())
    if not files:
        raise NativeError("this installation of jupyter_sing lacks its native sources")
    return digest.hexdigest()[:16]


def compiler_command() -> list[str]:
    """Return the command of the C++ compiler: ``CXX``, else g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def check_compiler() -> None:
    """Raise `NativeError` if there is no compiler, before a message asks users to wait for it."""
    compiler = compiler_command()[0]
    if shutil.which(compiler) is None:
        raise NativeError(f"there is no C++ compiler ({compiler}) to build the native part with")


class Compiler:
    """Compiles translation units and links libraries.

    Parameters
    ----------
    tree : Path
        The native sources.
    objects : Path
        Directory of objects; an object is reused if nothing that goes into it has changed.
    flags, link_flags : sequence of str
        For every unit, and for every library.
    search : sequence of str
        Linker arguments before the libraries, such as ``-L``.
    strict : bool
        Treat warnings as errors. For developers only: users may have a newer compiler with more
        warnings.
    basis : object
        Other dependencies of objects, such as the version of headers.
    tell : callable, optional
        Receives the number of compiled units and their total.
    """

    def __init__(
        self,
        tree: Path,
        objects: Path,
        flags: Sequence[str],
        link_flags: Sequence[str],
        search: Sequence[str] = (),
        *,
        strict: bool,
        basis: object = None,
        tell: Tell = lambda done, total: None,
    ) -> None:
        self.tree, self._objects = tree, objects
        self._tell = tell
        self._command = compiler_command()
        self._flags = [*flags, *(STRICT_FLAGS if strict else ("-w",)), f"-I{tree}"]
        self._link_flags, self._search, self._basis = link_flags, search, basis
        self._strict = strict

    def compile_all(
        self, units: Iterable[Path], precompiled: Path | None = None
    ) -> dict[Path, Path]:
        """Compile units in parallel; return their objects.

        Parameters
        ----------
        units : iterable of Path
            The sources.
        precompiled : Path, optional
            A header to compile once for all units, if it exists. Units include what they use also
            without it, so objects do not depend on it.
        """
        targets = {unit: self._target(unit) for unit in sorted(units)}
        missing = sum(not target.exists() for target in targets.values())
        self._tell(0, len(targets))
        with (
            self._precompiled(precompiled, missing) as header,
            ThreadPoolExecutor(max_workers=parallel_compilers()) as pool,
        ):
            futures = {
                pool.submit(self._compile, unit, target, header): unit
                for unit, target in targets.items()
            }
            try:
                compiled: dict[Path, Path] = {}
                for future in as_completed(futures):
                    compiled[futures[future]] = future.result()
                    self._tell(len(compiled), len(futures))
                return compiled
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def compile(self, unit: Path) -> Path:
        """Compile one unit, unless an object of the same source and flags exists."""
        return self._compile(unit, self._target(unit), ())

    def _target(self, unit: Path) -> Path:
        """Return the object of a unit; its name has a hash of everything that goes into it."""
        digest = hashlib.sha256(repr((self._command, self._flags, self._basis)).encode())
        for file in _includes(unit, self.tree):
            digest.update(f"\0{file}\0".encode() + file.read_bytes())
        return self._objects / f"{unit.parent.name}-{unit.stem}-{digest.hexdigest()[:20]}.o"

    def _compile(self, unit: Path, target: Path, header: Sequence[str]) -> Path:
        if target.exists():
            os.utime(target)
            return target
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.run([*self._flags, *header, "-c", str(unit), "-o", str(partial)])
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    @contextlib.contextmanager
    def _precompiled(self, header: Path | None, missing: int) -> Iterator[tuple[str, ...]]:
        """Precompile the header if `missing` units are worth it; yield the flags to use it.

        It exists only during one build, so it cannot become stale: another compiler or torch, or
        other flags, have their own. A compiler that cannot use it reads the header itself, which
        lies beside it.
        """
        if header is None or missing < PRECOMPILED_UNITS or not header.is_file():
            yield ()
            return
        with tempfile.TemporaryDirectory(prefix="precompiled.", dir=self._objects) as name:
            copy = Path(name) / header.name
            shutil.copyfile(header, copy)
            self.run([*self._flags, "-x", "c++-header", str(copy), "-o", f"{copy}.gch"])
            yield ("-include", str(copy), *(("-Winvalid-pch",) if self._strict else ()))

    def link(self, target: Path, objects: Sequence[Path], libraries: Sequence[str]) -> None:
        """Link a library from objects and other libraries."""
        self.run(
            [*self._link_flags, *map(str, objects), "-o", str(target), *self._search, *libraries]
        )

    def run(self, arguments: Sequence[str]) -> None:
        """Run the compiler.

        Raises
        ------
        NativeError
            It failed. The message has its first error; a note has its whole output.
        """
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
                timeout=COMPILE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeError(f"the C++ compiler could not be run: {error}") from error
        if done.returncode:
            lines = done.stderr.splitlines()
            first = next((line for line in lines if "error" in line), last_line(done.stderr))
            failure = NativeError(f"the C++ compiler failed: {first.strip()}")
            failure.add_note(done.stderr)
            raise failure


def parallel_compilers() -> int:
    """Return how many compilers may run at once: one per core, if there is memory for each."""
    cores = len(os.sched_getaffinity(0))
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text("ascii"), re.MULTILINE)
    except OSError:
        found = None
    return max(1, min(cores, int(found.group(1)) * 1024 // COMPILER_BYTES)) if found else cores


def _includes(unit: Path, tree: Path) -> list[Path]:
    """List a unit and all of the project's files that it includes, directly or indirectly."""
    seen: dict[Path, None] = {}
    waiting = [unit]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen[file] = None
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text("utf-8"), re.MULTILINE)
        for name in names:
            candidates = (file.parent / name, tree / name)
            waiting += [found for found in candidates if found.is_file()]
    return sorted(seen)


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
