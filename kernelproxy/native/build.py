"""Native libraries for one torch: find them, or build them once.

`libsing_client.so` is loaded into kernels, `libsing_worker.so` into workers. Both use torch's C++
interface, so there is one pair for each torch version and Python. A pair is looked up in the
installed package, in the machine's directory (`kernelproxy.native.machine_libraries`), then in the
user's cache, and is otherwise compiled into that cache.

The libraries contain no path to torch: they are loaded into processes that have already loaded
torch's own libraries, so one pair serves every environment with the same torch.

Standard library only: kernels use this module under their own interpreter.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelproxy.common.errors import NativeError
from kernelproxy.common.options import ANY_TORCH
from kernelproxy.native import libraries, tools
from kernelproxy.native import machine_libraries as machine
from kernelproxy.native.compiler import (
    COMPILE_FLAGS,
    SANITIZE_FLAGS,
    Compiler,
    Tell,
    check_compiler,
    hash_of,
    last_line,
    sources,
)
from kernelproxy.native.libraries import Message

TORCH_MIN, TORCH_END = (2, 11), (2, 14)
PROBE_SECONDS = 60

# Torch's headers then include those of single operators, and not of all of them at once.
TORCH_FLAGS = (*COMPILE_FLAGS, "-DAT_PER_OPERATOR_HEADERS")
PRECOMPILED = "oplog/precompiled.h"

# Sources of each library, as directories of the native tree.
LIBRARIES = {"client": ("oplog", "client"), "worker": ("oplog", "worker")}
#: Headers that the sources include: part of what the libraries are made of.
HEADERS = ("ops",)
LINKED = {"client": ("torch_python", "torch_cpu", "c10"), "worker": ("torch_cpu", "c10")}


@dataclass(frozen=True)
class TorchInfo:
    """Facts about the torch of one environment that are needed to compile against it."""

    version: str
    """Complete version, with the local part: `2.13.0+cpu`."""
    directory: Path
    python_tag: str
    machine: str
    python_include: Path

    @property
    def library_directory(self) -> Path:
        return self.directory / "lib"

    @property
    def include_directories(self) -> tuple[Path, ...]:
        """Directories of torch's headers, then of the interpreter's."""
        include = self.directory / "include"
        return include, include / "torch" / "csrc" / "api" / "include", self.python_include

    @property
    def short(self) -> str:
        """User-facing version: `2.13`."""
        found = re.match(r"\d+\.\d+", self.version)
        return found[0] if found else self.version


@dataclass(frozen=True)
class NativeParts:
    """Paths of the two libraries."""

    client: Path
    worker: Path

    @classmethod
    def inside(cls, directory: Path) -> NativeParts | None:
        """Return the pair in `directory`, or None."""
        parts = cls(directory / "libsing_client.so", directory / "libsing_worker.so")
        return parts if parts.client.is_file() and parts.worker.is_file() else None


# ---------------------------------------------------------------- which torch


def _facts(directory: str | None = None) -> dict[str, str]:
    """Describe this interpreter and its torch, without importing torch.

    The source of this function is also run by other interpreters, so it imports what it needs.
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
        Torch's directory, for callers that have found its spec already.

    Raises
    ------
    NativeError
        This interpreter has no torch, or the directory is not one of torch.
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
        Its environment variables; this process's by default.

    Raises
    ------
    NativeError
        The interpreter cannot be run, or has no torch.
    """
    # Remove the working directory from the path: it could contain another `torch/`.
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
        raise NativeError(f"{python} failed: {last_line(error.stderr)}") from error
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
    """Find the libraries for a torch; build them if they do not exist.

    Parameters
    ----------
    info : TorchInfo
        From `describe` or `find_torch`.
    message : callable, optional
        Receives the progress of a build, in this process or in another one that builds the same.
    sanitize : bool
        Build with the address and undefined-behaviour sanitizers, for development.
    developing : bool, optional
        Treat warnings as errors, and keep objects for the next build; by default in a checkout.
    cache : Path, optional
        Directory of builds; the user's cache by default.

    Returns
    -------
    NativeParts

    Raises
    ------
    NativeError
        This torch is not supported, or the libraries cannot be built here.
    """
    check_version(info)
    tree = libraries.source_tree()
    key = _key(info, tree, sanitize)

    def build(cache: Path, tell: Tell) -> None:
        check_compiler()
        if not (info.python_include / "Python.h").is_file():
            raise NativeError(f"the C headers of Python are missing in {info.python_include}")
        strict = libraries.is_checkout(tree) if developing is None else developing
        compiler = functools.partial(_compiler, info, tree, tell, sanitize=sanitize, strict=strict)
        libraries.publish(
            cache, key, lambda objects, target: _build(compiler(objects), target), keep=strict
        )
        if strict:
            libraries.prune(cache)

    what = f"GPU support for torch {info.short}"
    return libraries.find_or_build(key, cache, NativeParts.inside, build, what, message)


def build_for_machine(info: TorchInfo, message: Message | None = None) -> list[Path]:
    """Build for all users what users of this torch would otherwise compile at first use.

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
        This user has no permission, or they cannot be built.
    """
    return machine.build(
        [
            lambda cache: ensure(info, message, cache=cache, developing=False).client,
            lambda cache: tools.file_tracker(message, cache=cache, developing=False),
            lambda cache: tools.sandbox_program(message, cache=cache, developing=False),
        ]
    )


def check_version(info: TorchInfo) -> None:
    """Raise `NativeError` if this torch is not supported."""
    found = re.match(r"(\d+)\.(\d+)", info.version)
    version = (int(found.group(1)), int(found.group(2))) if found else (0, 0)
    if not TORCH_MIN <= version < TORCH_END and ANY_TORCH.text() != "1":
        raise NativeError(
            f"torch {info.version} is not supported: 2.{TORCH_MIN[1]} to 2.{TORCH_END[1] - 1} are"
            f" ({ANY_TORCH.variable}=1 tries anyway)"
        )


def _key(info: TorchInfo, tree: Path, sanitize: bool) -> str:
    """Return a pair's cache key: torch, Python, machine, and a hash of sources and flags."""
    parts = ("oplog", *HEADERS, "client", "worker")
    digest = hash_of(tree, parts, (TORCH_FLAGS, LIBRARIES, LINKED))
    version = re.sub(r"[^\w.+]", "_", info.version)
    kind = "-sanitize" if sanitize else ""
    return f"torch{version}-{info.python_tag}-{info.machine}-{digest}{kind}"


# ---------------------------------------------------------------- building


def _compiler(
    info: TorchInfo, tree: Path, tell: Tell, objects: Path, *, sanitize: bool, strict: bool
) -> Compiler:
    """Return the compiler of a pair."""
    extra = SANITIZE_FLAGS if sanitize else ()
    flags = [*TORCH_FLAGS, *extra]
    for directory in info.include_directories:
        flags += ["-isystem", str(directory)]
    found = [f"-L{info.library_directory}"]
    link_flags = ["-shared", "-pthread", *extra]
    return Compiler(tree, objects, flags, link_flags, found, strict=strict, basis=info, tell=tell)


def _build(compiler: Compiler, target: Path) -> None:
    """Compile the translation units in parallel and link the two libraries."""
    units = {name: sources(compiler.tree, parts, (".cpp",)) for name, parts in LIBRARIES.items()}
    for name, found in units.items():
        if not found:
            raise NativeError(f"the native sources hold no {name}")
    every = {unit for found in units.values() for unit in found}
    compiled = compiler.compile_all(every, compiler.tree / PRECOMPILED)
    for name, found in units.items():
        linked = [f"-l{library}" for library in LINKED[name]]
        objects = [compiled[unit] for unit in found]
        compiler.link(target / f"libsing_{name}.so", objects, linked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Find or build the native libraries for an interpreter, and print their two paths."""
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
            print(*build_for_machine(info, libraries.printer(sys.stderr)), sep="\n")
            return 0
        parts = ensure(info, libraries.printer(sys.stderr), sanitize=options.sanitize)
    except NativeError as error:
        for line in (*getattr(error, "__notes__", ()), f"{parser.prog}: {error}"):
            print(line, file=sys.stderr)
        return 1
    print(parts.client, parts.worker, sep="\n")
    return 0
