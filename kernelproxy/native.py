"""The native part for one torch: found, or built once.

`libsing_client.so` goes into kernels, `libsing_worker.so` into workers. Both use torch's C++
interface, so there is one pair for each torch version and Python. A pair is looked for in the
installed package, in the machine's directory (`kernelproxy.machine`), then in the user's cache, and
is otherwise compiled into that cache.

The libraries carry no path to torch: they are loaded into processes that have loaded torch's own
libraries before, so one pair serves every environment with the same torch.

Standard library only: kernels use this module under their own interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kernelproxy import machine, paths
from kernelproxy.errors import ControlError, NativeError
from kernelproxy.ownership import check_inside

PACKAGE = Path(__file__).resolve().parent
TORCH_MIN, TORCH_END = (2, 11), (2, 14)
PROBE_SECONDS = 60
COMPILE_SECONDS = 1200
#: What one compiler takes at most of torch's headers.
COMPILER_BYTES = 900 << 20
MEMINFO = Path("/proc/meminfo")
OBJECTS_KEPT = 200
PAIRS_KEPT = 8

# Sources of each library, as directories of the native tree.
LIBRARIES = {"client": ("oplog", "client"), "worker": ("oplog", "worker")}
LINKED = {"client": ("torch_python", "torch_cpu", "c10"), "worker": ("torch_cpu", "c10")}

COMPILE_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-pthread")
SANITIZE_FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined")
# GCC's guess about uninitialised values is often wrong about inlined headers of torch.
STRICT_FLAGS = ("-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized")

Message = Callable[[str], object]
T = TypeVar("T")


@dataclass(frozen=True)
class TorchInfo:
    """The torch of one environment, as far as compiling against it needs to know."""

    version: str
    """Complete, with the local part: `2.13.0+cpu`."""
    directory: Path
    python_tag: str
    machine: str
    python_include: Path

    @property
    def library_directory(self) -> Path:
        return self.directory / "lib"

    @property
    def include_directories(self) -> tuple[Path, ...]:
        """Torch's headers, then those of the interpreter."""
        include = self.directory / "include"
        return include, include / "torch" / "csrc" / "api" / "include", self.python_include


@dataclass(frozen=True)
class NativeParts:
    """The two libraries."""

    client: Path
    worker: Path

    @classmethod
    def inside(cls, directory: Path) -> NativeParts | None:
        """The pair in `directory`, or None."""
        parts = cls(directory / "libsing_client.so", directory / "libsing_worker.so")
        return parts if parts.client.is_file() and parts.worker.is_file() else None


# ---------------------------------------------------------------- which torch


def _facts(directory: str | None = None) -> dict[str, str]:
    """Describe this interpreter and its torch without importing it.

    The source of this function is also sent to other interpreters, so it imports what it needs.
    """
    import importlib.util
    import os
    import platform
    import re
    import sys
    import sysconfig

    if directory is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.origin:
            return {}
        directory = os.path.dirname(spec.origin)
    with open(os.path.join(directory, "version.py"), encoding="utf-8") as file:
        found = re.search(r"^__version__ = '([^']+)'", file.read(), re.MULTILINE)
    return {
        "version": found.group(1) if found else "unknown",
        "directory": directory,
        "python_tag": str(sys.implementation.cache_tag),
        "machine": platform.machine(),
        "python_include": sysconfig.get_paths()["include"],
    }


def _torch_info(facts: dict[str, Any], where: str) -> TorchInfo:
    if not facts:
        raise NativeError(f"{where} has no torch")
    return TorchInfo(
        version=facts["version"],
        directory=Path(facts["directory"]),
        python_tag=facts["python_tag"],
        machine=facts["machine"],
        python_include=Path(facts["python_include"]),
    )


def describe(directory: Path | None = None) -> TorchInfo:
    """Describe the torch of the running interpreter, without importing it.

    Parameters
    ----------
    directory : Path, optional
        Where torch lies, for callers that have found its spec already.

    Raises
    ------
    NativeError
        This interpreter has no torch, or its directory is not one of torch.
    """
    try:
        return _torch_info(_facts(str(directory) if directory else None), "this environment")
    except OSError as error:
        raise NativeError(f"torch could not be read: {error}") from error


def find_torch(python: str, env: dict[str, str] | None = None) -> TorchInfo:
    """Describe the torch of another interpreter, without importing it.

    Parameters
    ----------
    python : str
        Path of the interpreter.
    env : dict, optional
        Its environment variables, this process's by default.

    Raises
    ------
    NativeError
        The interpreter cannot be run, or has no torch.
    """
    # The working directory is not where an installed torch is, but could hold a `torch/`.
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        f"{inspect.getsource(_facts)}\nimport json; print(); print(json.dumps(_facts()))"
    )
    code = "from __future__ import annotations\n" + code
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            env=env,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_SECONDS,
            check=True,
        )
        facts = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise NativeError(f"{python} failed: {_last_line(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise NativeError(f"{python} could not be asked for its torch: {error}") from error
    return _torch_info(facts, python)


# ---------------------------------------------------------------- which libraries


def ensure(
    info: TorchInfo,
    message: Message | None = None,
    *,
    sanitize: bool = False,
    developing: bool | None = None,
    cache: Path | None = None,
) -> NativeParts:
    """Find the libraries for a torch; build them if nobody has.

    Parameters
    ----------
    info : TorchInfo
        From `describe` or `find_torch`.
    message : callable, optional
        Is told, in one sentence, that a build begins or is being waited for.
    sanitize : bool
        Build with the address and undefined-behaviour sanitizers, for development.
    developing : bool, optional
        Refuse warnings, and keep objects for the next build; by default in a checkout.
    cache : Path, optional
        Where to build; the user's cache by default.

    Returns
    -------
    NativeParts

    Raises
    ------
    NativeError
        This torch is not supported, or the libraries cannot be built here.
    """
    check_version(info)
    tree = source_tree()
    key = _key(info, tree, sanitize)
    cache = cache or cache_directory()

    def build(say: Message) -> None:
        check_compiler()
        if not (info.python_include / "Python.h").is_file():
            raise NativeError(f"the C headers of Python are missing in {info.python_include}")
        say(f"Compiling GPU support for torch {info.version} (first use only): a minute or two.")
        strict = is_checkout(tree) if developing is None else developing
        note = progress_file(cache, key)
        compiler = functools.partial(
            _compiler, info, tree, sanitize=sanitize, strict=strict, progress=note
        )
        try:
            publish(
                cache, key, lambda objects, target: _build(compiler(objects), target), keep=strict
            )
        finally:
            note.unlink(missing_ok=True)
        if strict:
            _prune(cache)

    return find_or_build(key, cache, NativeParts.inside, build, message)


def build_for_machine(info: TorchInfo, message: Message | None = None) -> list[Path]:
    """Build all that users of this torch would compile at their first cell, for all of them.

    Parameters
    ----------
    info, message
        See `ensure`.

    Returns
    -------
    list of Path
        Directories of the libraries: in `machine.directory`, or in the installed package.

    Raises
    ------
    NativeError
        This user may not, or they cannot be built.
    """
    from kernelproxy import fstrack
    from kernelproxy.process import sandbox

    return machine.build(
        [
            lambda cache: ensure(info, message, cache=cache, developing=False).client,
            lambda cache: fstrack.library(message, cache=cache, developing=False),
            lambda cache: sandbox.program(message, cache=cache, developing=False),
        ]
    )


def find_or_build(
    key: str,
    cache: Path,
    inside: Callable[[Path], T | None],
    build: Callable[[Message], object],
    message: Message | None = None,
) -> T:
    """Find libraries in the package, the machine's directory or a cache; one process builds.

    Parameters
    ----------
    key : str
        Name of their directory.
    cache : Path
        Where `build` puts that.
    inside : callable
        Returns what is in a directory, or None if it is not whole.
    build : callable
        Builds them; is passed `message`.
    message : callable, optional
        See `ensure`.

    Raises
    ------
    NativeError
        They cannot be built here.
    """
    if found := inside(PACKAGE / "_native_lib" / key):
        return found
    if found := machine.inside(key, inside):
        return found
    if found := _safe(cache / key, inside):
        return found
    say = message or (lambda text: None)
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(cache / f"{key}.lock", say):
            if found := _safe(cache / key, inside):
                return found
            build(say)
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


def progress_file(cache: Path, key: str) -> Path:
    """Where it is noted how far the compilation of a pair is."""
    return cache / f"{key}.progress"


def progress(cache: Path, key: str) -> tuple[int, int] | None:
    """How many of how many units are compiled; None if nobody compiles this pair."""
    try:
        done, total = progress_file(cache, key).read_text("ascii").split()
        with (cache / f"{key}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(done), int(total)
    except (OSError, ValueError):
        pass
    return None  # whoever has noted something is gone


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


def check_version(info: TorchInfo) -> None:
    """Raise `NativeError` if this torch is not supported."""
    found = re.match(r"(\d+)\.(\d+)", info.version)
    version = (int(found.group(1)), int(found.group(2))) if found else (0, 0)
    if not TORCH_MIN <= version < TORCH_END and os.environ.get("JUPYTER_SING_ANY_TORCH") != "1":
        raise NativeError(
            f"torch {info.version} is not supported: 2.{TORCH_MIN[1]} to 2.{TORCH_END[1] - 1} are"
            " (JUPYTER_SING_ANY_TORCH=1 tries anyway)"
        )


def source_tree() -> Path:
    """The native sources: shipped in the package, or beside it in a checkout."""
    shipped = PACKAGE / "_native"
    return shipped if shipped.is_dir() else PACKAGE.parent / "native"


def is_checkout(tree: Path) -> bool:
    """Whether sources are those of a clone, whose users are developers."""
    return tree != PACKAGE / "_native"


def sources(tree: Path, parts: Iterable[str], suffixes: Sequence[str]) -> list[Path]:
    files = (file for part in parts for file in (tree / part).glob("*"))
    return sorted(file for file in files if file.suffix in suffixes)


def _key(info: TorchInfo, tree: Path, sanitize: bool) -> str:
    """Name what a pair depends on: torch, Python, machine, sources, and how they are compiled."""
    digest = hash_of(tree, ("oplog", "client", "worker"), (COMPILE_FLAGS, LIBRARIES, LINKED))
    version = re.sub(r"[^\w.+]", "_", info.version)
    kind = "-sanitize" if sanitize else ""
    return f"torch{version}-{info.python_tag}-{info.machine}-{digest}{kind}"


def hash_of(tree: Path, parts: Iterable[str], how: object) -> str:
    """Name sources and how they are compiled.

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


@contextlib.contextmanager
def _locked(path: Path, say: Message) -> Iterator[None]:
    """Hold the lock file `path`: one process builds, the others wait for it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process that is compiling GPU support for this torch.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- building


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
        shutil.rmtree(stale)
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


def compiler_command() -> list[str]:
    """The C++ compiler: ``CXX``, else g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def check_compiler() -> None:
    """Raise `NativeError` if there is no compiler, before anybody is told to wait for it."""
    compiler = compiler_command()[0]
    if shutil.which(compiler) is None:
        raise NativeError(f"there is no C++ compiler ({compiler}) to build the native part with")


def _compiler(
    info: TorchInfo, tree: Path, objects: Path, *, sanitize: bool, strict: bool, progress: Path
) -> Compiler:
    """The compiler of a pair."""
    extra = SANITIZE_FLAGS if sanitize else ()
    flags = [*COMPILE_FLAGS, *extra]
    for directory in info.include_directories:
        flags += ["-isystem", str(directory)]
    found = [f"-L{info.library_directory}"]
    link_flags = ["-shared", "-pthread", *extra]
    return Compiler(
        tree, objects, flags, link_flags, found, strict=strict, basis=info, progress=progress
    )


def _build(compiler: Compiler, target: Path) -> None:
    """Compile the translation units in parallel and link the two libraries."""
    units = {name: sources(compiler.tree, parts, (".cpp",)) for name, parts in LIBRARIES.items()}
    for name, found in units.items():
        if not found:
            raise NativeError(f"the native sources hold no {name}")
    compiled = compiler.compile_all({unit for found in units.values() for unit in found})
    for name, found in units.items():
        libraries = [f"-l{library}" for library in LINKED[name]]
        objects = [compiled[unit] for unit in found]
        compiler.link(target / f"libsing_{name}.so", objects, libraries)


class Compiler:
    """Compiles translation units and links libraries.

    Parameters
    ----------
    tree : Path
        The native sources.
    objects : Path
        Where objects are put, and found if nothing that goes into them has changed.
    flags, link_flags : sequence of str
        For every unit, and for every library.
    search : sequence of str
        What comes before the libraries that one is linked with.
    strict : bool
        Refuse warnings: they are to stop us, not users whose compiler is newer than ours.
    basis : object
        What else objects depend on, such as the version of headers.
    progress : Path, optional
        Where it is noted how many units are compiled.
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
        progress: Path | None = None,
    ) -> None:
        self.tree, self._objects = tree, objects
        self._progress = progress
        self._command = compiler_command()
        self._flags = [*flags, *(STRICT_FLAGS if strict else ("-w",)), f"-I{tree}"]
        self._link_flags, self._search, self._basis = link_flags, search, basis

    def compile_all(self, units: Iterable[Path]) -> dict[Path, Path]:
        """Compile units in parallel; return their objects."""
        with ThreadPoolExecutor(max_workers=parallel_compilers()) as pool:
            futures = {pool.submit(self.compile, unit): unit for unit in sorted(units)}
            try:
                compiled = {}
                for done, future in enumerate(as_completed(futures), start=1):
                    compiled[futures[future]] = future.result()
                    self.proceeded(done, len(futures))
                return compiled
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def proceeded(self, done: int, total: int) -> None:
        """Note how many units are compiled, for whoever waits; see `progress`."""
        if self._progress is None:
            return
        with contextlib.suppress(OSError):  # it only tells
            partial = self._progress.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(f"{done} {total}", "ascii")
            partial.rename(self._progress)

    def compile(self, unit: Path) -> Path:
        """Compile one unit, unless an object of the same text and flags is there."""
        digest = hashlib.sha256(repr((self._command, self._flags, self._basis)).encode())
        for file in _includes(unit, self.tree):
            digest.update(f"\0{file}\0".encode() + file.read_bytes())
        target = self._objects / f"{unit.parent.name}-{unit.stem}-{digest.hexdigest()[:20]}.o"
        if target.exists():
            os.utime(target)
            return target
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.run([*self._flags, "-c", str(unit), "-o", str(partial)])
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def link(self, target: Path, objects: Sequence[Path], libraries: Sequence[str]) -> None:
        """Link one library with others."""
        self.run(
            [*self._link_flags, *map(str, objects), "-o", str(target), *self._search, *libraries]
        )

    def run(self, arguments: Sequence[str]) -> None:
        """Run the compiler.

        Raises
        ------
        NativeError
            It failed; the first error that it reports is the message, its whole output a note.
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
            first = next((line for line in lines if "error" in line), _last_line(done.stderr))
            failure = NativeError(f"the C++ compiler failed: {first.strip()}")
            failure.add_note(done.stderr)
            raise failure


def parallel_compilers() -> int:
    """How many compilers may run at once: one a core, if there is memory for each."""
    cores = len(os.sched_getaffinity(0))
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text("ascii"), re.MULTILINE)
    except OSError:
        found = None
    return max(1, min(cores, int(found.group(1)) * 1024 // COMPILER_BYTES)) if found else cores


def _includes(unit: Path, tree: Path) -> list[Path]:
    """List a unit and all files of ours that it includes, directly or not."""
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


def _prune(cache: Path) -> None:
    """Keep what was built or used last: a checkout makes another pair with every change."""

    def oldest(files: Iterable[Path], kept: int) -> list[Path]:
        return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[kept:]

    for file in oldest((cache / "objects").glob("*.o"), OBJECTS_KEPT):
        file.unlink(missing_ok=True)
    for lock in oldest(cache.glob("torch*.lock"), PAIRS_KEPT):
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build for an interpreter and print the two paths: `python -m kernelproxy.native`."""
    parser = argparse.ArgumentParser(prog="python -m kernelproxy.native", description=main.__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the torch")
    parser.add_argument("--sanitize", action="store_true", help="with address sanitizer and UBSan")
    parser.add_argument("--machine", action="store_true", help="for all users, as root")
    parser.add_argument("--torch-dir", action="store_true", help="print only where its torch lies")
    options = parser.parse_args(arguments)
    try:
        info = find_torch(options.python)
        if options.torch_dir:
            print(info.directory)
            return 0
        if options.machine:
            print(*build_for_machine(info, lambda text: print(text, file=sys.stderr)), sep="\n")
            return 0
        parts = ensure(info, lambda text: print(text, file=sys.stderr), sanitize=options.sanitize)
    except NativeError as error:
        for line in (*getattr(error, "__notes__", ()), f"{parser.prog}: {error}"):
            print(line, file=sys.stderr)
        return 1
    print(parts.client, parts.worker, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
