"""The file tracker: `libsing_fstrack.so`, preloaded into kernels, and what names it there.

It notes in a journal which files a kernel and its children change; `changed_files` reads that.
Unlike the rest of the native part it knows nothing of torch and Python, so there is one for every
environment, and it compiles in a second or two. A kernel without it starts all the same.

The library asks for no version of any symbol: a child may run in a container of its own, whose
older libc would refuse to start a program with it otherwise.
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
# Programs with the address sanitizer refuse to start behind any other library otherwise.
SANITIZER_OPTION = "verify_asan_link_order=0"

# Its own line, as an interpreter may print others.
_CHECK = f"print(); print({TRACKER_LIBRARY!r} in open('/proc/self/maps').read())"


def check(python: str, library: Path, env: MutableMapping[str, str] | None = None) -> None:
    """Make sure that an interpreter starts with the tracker, in silence, and loads it.

    Parameters
    ----------
    python : str
        Path of the interpreter.
    library : Path
        From `library`.
    env : dict, optional
        Its environment variables, this process's by default.

    Raises
    ------
    NativeError
        It does not: it is linked statically, for another machine, or instrumented.
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
        said = done.stderr.strip().splitlines()
        raise NativeError(
            f"{python} does not start with the file tracker: {said[-1] if said else 'no output'}"
        )
    if done.stdout.split()[-1:] != ["True"]:
        raise NativeError(f"{python} does not load the file tracker (is it linked statically?)")


def preload(env: MutableMapping[str, str], library: Path) -> None:
    """Put the tracker before what an environment preloads already.

    Raises
    ------
    NativeError
        Its path cannot be written there.
    """
    if re.search(r"[\s:;$]", str(library)):
        raise NativeError(f"LD_PRELOAD cannot name the file tracker in {library.parent}")
    env["LD_PRELOAD"] = ":".join(filter(None, [str(library), env.get("LD_PRELOAD", "")]))
    env["ASAN_OPTIONS"] = ":".join(filter(None, [env.get("ASAN_OPTIONS", ""), SANITIZER_OPTION]))


def follow(journal: Path) -> None:
    """Have this process's changes, and those of children to come, noted in another journal."""
    os.environ[JOURNAL_VARIABLE] = str(journal)
    with contextlib.suppress(AttributeError):  # it is not tracked
        ctypes.CDLL(None).sing_fstrack_follow(os.fsencode(journal))


def leave(env: MutableMapping[str, str]) -> None:
    """Take the tracker out of an environment, such as one that was inherited from a kernel."""
    for name in (JOURNAL_VARIABLE, REASON_VARIABLE):
        env.pop(name, None)
    if TRACKER_LIBRARY not in env.get("LD_PRELOAD", ""):
        return  # and is not rewritten
    _without(env, "LD_PRELOAD", lambda path: Path(path).name == TRACKER_LIBRARY)
    _without(env, "ASAN_OPTIONS", lambda option: option == SANITIZER_OPTION)


def _without(env: MutableMapping[str, str], name: str, is_ours: Callable[[str], bool]) -> None:
    """Take what is ours out of a list; nothing is left of an empty one."""
    kept = [each for each in re.split(r"[\s:]+", env.get(name, "")) if each and not is_ours(each)]
    if kept:
        env[name] = ":".join(kept)
    else:
        env.pop(name, None)
