"""The two C++ tools that do not depend on torch or Python: file tracker and sandbox.

One build of each serves all environments of a machine, and takes seconds.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kernelproxy.common.errors import NativeError
from kernelproxy.native import compiler, libraries

TRACKER_LIBRARY = "libsing_fstrack.so"
TRACKER_PARTS = ("fstrack",)
# Some compilers by default add checks that call libc, or headers that redefine its functions.
TRACKER_COMPILE_FLAGS = (
    *compiler.COMPILE_FLAGS,
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
)
# Symbols are resolved at load time: later resolution is not safe in a signal handler.
TRACKER_LINK_FLAGS = ("-shared", "-nostdlib", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,--no-as-needed")
TRACKER_NEEDED = ("libc.so.6", "libdl.so.2")

SANDBOX_PROGRAM = "sing-sandbox"
SANDBOX_PARTS = ("sandbox",)
SANDBOX_COMPILE_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-pthread")
#: Static, because a kernel's environment may preload libraries, which the sandbox must not load.
SANDBOX_STATIC_FLAGS = ("-static", "-s")
SANDBOX_LINK_FLAGS = ("-s",)


class _Make(Protocol):
    """Callable that returns a compiler with the given linker flags."""

    def __call__(self, link_flags: tuple[str, ...]) -> compiler.Compiler: ...


@dataclass(frozen=True)
class _Tool:
    """A tool that is built from some of the native sources.

    Parameters
    ----------
    what : str
        User-facing name.
    name, file : str
        Prefix of the directory's name, and name of the file.
    access : int
        Required access to the file, as for `os.access`.
    parts : tuple of str
        Directories of the native sources.
    flags : tuple of tuples of str
        All build flags; those of the compiler first.
    build : callable
        Called with a `_Make`, the source tree and the target directory.
    """

    what: str
    name: str
    file: str
    access: int
    parts: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...]
    build: Callable[[_Make, Path, Path], None]

    def find(
        self, message: libraries.Message | None, cache: Path | None, developing: bool | None
    ) -> Path:
        """Find the tool; build it if it does not exist. See `file_tracker`."""
        tree = libraries.source_tree()
        digest = compiler.hash_of(tree, self.parts, self.flags)
        key = f"{self.name}-{platform.machine()}-{digest}"

        def inside(directory: Path) -> Path | None:
            file = directory / self.file
            return file if os.access(file, self.access) else None

        def build(cache: Path, tell: compiler.Tell) -> None:
            compiler.check_compiler()
            strict = libraries.is_checkout(tree) if developing is None else developing

            def into(objects: Path, target: Path) -> None:
                def make(link_flags: tuple[str, ...]) -> compiler.Compiler:
                    flags = self.flags[0]
                    return compiler.Compiler(
                        tree, objects, flags, link_flags, strict=strict, tell=tell
                    )

                self.build(make, tree, target)

            libraries.publish(cache, key, into, keep=strict)

        return libraries.find_or_build(key, cache, inside, build, self.what, message)


def _build_tracker(make: _Make, tree: Path, target: Path) -> None:
    """Compile the file tracker, and link it with empty stub libraries named like libc and libdl.

    So it needs libc and libdl, but no specific version of them.
    """
    made = make(TRACKER_LINK_FLAGS)
    units = compiler.sources(tree, TRACKER_PARTS, (".cpp",))
    compiled = made.compile_all(units)
    needed = [target / name for name in TRACKER_NEEDED]
    for stub in needed:
        soname = f"-Wl,-soname,{stub.name}"
        made.run(["-shared", "-nostdlib", soname, "-x", "c++", os.devnull, "-o", str(stub)])
    objects = [compiled[unit] for unit in units]
    made.link(target / TRACKER_LIBRARY, objects, [str(stub) for stub in needed])
    for stub in needed:
        stub.unlink()


def _build_sandbox(make: _Make, tree: Path, target: Path) -> None:
    static = make(SANDBOX_STATIC_FLAGS)
    compiled = list(static.compile_all(compiler.sources(tree, SANDBOX_PARTS, (".cpp",))).values())
    try:
        static.link(target / SANDBOX_PROGRAM, compiled, ())
    except NativeError:  # some systems have no static libraries
        make(SANDBOX_LINK_FLAGS).link(target / SANDBOX_PROGRAM, compiled, ())


_TRACKER = _Tool(
    "the file tracker",
    "fstrack",
    TRACKER_LIBRARY,
    os.R_OK,
    TRACKER_PARTS,
    (TRACKER_COMPILE_FLAGS, TRACKER_LINK_FLAGS),
    _build_tracker,
)
_SANDBOX = _Tool(
    "the sandbox of kernels",
    "sandbox",
    SANDBOX_PROGRAM,
    os.X_OK,
    SANDBOX_PARTS,
    (SANDBOX_COMPILE_FLAGS, SANDBOX_STATIC_FLAGS, SANDBOX_LINK_FLAGS),
    _build_sandbox,
)


def file_tracker(
    message: libraries.Message | None = None,
    *,
    cache: Path | None = None,
    developing: bool | None = None,
) -> Path:
    """Find the file tracker; build it if it does not exist.

    Parameters
    ----------
    message, cache, developing
        See `build.ensure`.

    Raises
    ------
    NativeError
        It cannot be built here.
    """
    return _TRACKER.find(message, cache, developing)


def sandbox_program(
    message: libraries.Message | None = None,
    *,
    cache: Path | None = None,
    developing: bool | None = None,
) -> Path:
    """Find the program ``sing-sandbox``; build it if it does not exist. See `file_tracker`."""
    return _SANDBOX.find(message, cache, developing)
