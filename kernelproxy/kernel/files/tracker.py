"""File tracker: `libsing_fstrack.so`, preloaded into kernels, and its environment variables.

It records in a journal which files a kernel and its children change; `changed_files` reads the
journal. Unlike the rest of the native part it depends neither on torch nor on Python, so one build
serves every environment, and it compiles in a second or two. A kernel also starts without it.

The library requires no version of any symbol: a child may run in a container whose older libc would
otherwise refuse to start a program with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Callable, MutableMapping
from pathlib import Path

from kernelproxy.common.errors import NativeError
from kernelproxy.native.tools import TRACKER_LIBRARY

JOURNAL_VARIABLE = "SING_FSTRACK"
REASON_VARIABLE = "SING_FSTRACK_REASON"
CHECK_SECONDS = 30
# Programs with the address sanitizer otherwise refuse to start with a preloaded library.
SANITIZER_OPTION = "verify_asan_link_order=0"

# On a line of its own, because an interpreter may print other lines.
_CHECK = f"print(); print({TRACKER_LIBRARY!r} in open('/proc/self/maps').read())"


def check(python: str, library: Path, env: MutableMapping[str, str] | None = None) -> None:
    """Check that an interpreter starts with the tracker, prints no error, and loads it.

    Parameters
    ----------
    python : str
        Path of the interpreter.
    library : Path
        From `library`.
    env : dict, optional
        Environment variables; default: those of this process.

    Raises
    ------
    NativeError
        If it does not: it is linked statically, for another machine, or instrumented.
    """
    trial = dict(os.environ if env is None else env)
    leave(trial)
    preload(trial, library)
    command = [python, "-I", "-S", "-c", _CHECK]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=trial,
            stdin=subprocess.DEVNULL,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{python} could not be tried with the file tracker: {error}") from error
    if done.returncode or TRACKER_LIBRARY in done.stderr:
        lines = done.stderr.strip().splitlines()
        raise NativeError(
            f"{python} does not start with the file tracker: {lines[-1] if lines else 'no output'}"
        )
    if done.stdout.split()[-1:] != ["True"]:
        raise NativeError(f"{python} does not load the file tracker (is it linked statically?)")


def preload(env: MutableMapping[str, str], library: Path) -> None:
    """Add the tracker in front of what an environment preloads already.

    Raises
    ------
    NativeError
        If LD_PRELOAD cannot contain its path.
    """
    if re.search(r"[\s:;$]", str(library)):
        raise NativeError(f"LD_PRELOAD cannot name the file tracker in {library.parent}")
    env["LD_PRELOAD"] = ":".join(filter(None, [str(library), env.get("LD_PRELOAD", "")]))
    env["ASAN_OPTIONS"] = ":".join(filter(None, [env.get("ASAN_OPTIONS", ""), SANITIZER_OPTION]))


def follow(journal: Path) -> None:
    """Record changes by this process, and by its future children, in another journal."""
    os.environ[JOURNAL_VARIABLE] = str(journal)
    with contextlib.suppress(AttributeError):  # the tracker is not loaded
        ctypes.CDLL(None).sing_fstrack_follow(os.fsencode(journal))


def leave(env: MutableMapping[str, str]) -> None:
    """Remove the tracker from an environment, such as one that was inherited from a kernel."""
    for name in (JOURNAL_VARIABLE, REASON_VARIABLE):
        env.pop(name, None)
    if TRACKER_LIBRARY not in env.get("LD_PRELOAD", ""):
        return  # and stays unchanged
    _without(env, "LD_PRELOAD", lambda path: Path(path).name == TRACKER_LIBRARY)
    _without(env, "ASAN_OPTIONS", lambda option: option == SANITIZER_OPTION)


def _without(env: MutableMapping[str, str], name: str, is_ours: Callable[[str], bool]) -> None:
    """Remove our entries from a list variable; remove the variable if nothing is left."""
    kept = [each for each in re.split(r"[\s:]+", env.get(name, "")) if each and not is_ours(each)]
    if kept:
        env[name] = ":".join(kept)
    else:
        env.pop(name, None)
