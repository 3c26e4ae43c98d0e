"""System daemon for users without accounts, and a directory where all of them can read Python.

The interpreter that runs the tests may be in a directory that only root can read. Then the files
that it needs are linked, or copied, to where every user can read them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelproxy.native import build as native
from kernelproxy.native import tools

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 120.0
_PACKAGES = ("kernelproxy", "jupyter_sing", "native")


def build(base: Path) -> Path:
    """Fill a directory that every user can read; return an interpreter that has torch.

    Parameters
    ----------
    base : Path
        The directory; it also gets the packages, in ``packages``, with the native part.
    """
    packages = base / "packages"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in _PACKAGES:
        shutil.copytree(ROOT / name, packages / name, ignore=ignored)
    parts = native.ensure(native.describe())
    for built in (parts.client.parent, tools.file_tracker(lambda text: None).parent):
        shutil.copytree(built, packages / "kernelproxy" / "_native_lib" / built.name)
    _open_to_all(packages)
    environment = base / "environment"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (environment / "bin").mkdir(parents=True)
    (environment / "lib" / version).mkdir(parents=True)
    home = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    if not _readable(home):
        prefix, ours = Path(sys.base_prefix).resolve(), base / "python"
        _link(prefix, ours, {"site-packages", "test", "share", "__pycache__"})
        home = ours / home.relative_to(prefix)
    (environment / "bin" / "python").symlink_to(home)
    (environment / "pyvenv.cfg").write_text(f"home = {home.parent}\n")
    libraries, site = Path(sysconfig.get_paths()["purelib"]), environment / "lib" / version
    if _readable(libraries / "torch" / "version.py"):
        (site / "site-packages").symlink_to(libraries)
    else:
        _link(libraries, site / "site-packages", {"__pycache__"})
    return environment / "bin" / "python"


def _readable(path: Path) -> bool:
    """True if other users than root can read a file."""
    return path.stat().st_mode & 0o004 != 0 and all(
        parent.stat().st_mode & 0o001 for parent in path.parents
    )


def _link(source: Path, target: Path, left_out: set[str]) -> None:
    def link(old: str, new: str) -> None:
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:  # another file system
            shutil.copy2(old, new, follow_symlinks=False)

    ignored = shutil.ignore_patterns(*left_out)
    shutil.copytree(source, target, symlinks=True, ignore=ignored, copy_function=link)


def _open_to_all(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))


class SharedMachine:
    """A machine with a system daemon.

    Parameters
    ----------
    base : Path
        A directory of root's; its parent was filled by `build`.
    python : Path
        An interpreter that every user can run.
    """

    def __init__(self, base: Path, python: Path) -> None:
        base.mkdir(mode=0o755)
        self.base, self.python = base, python
        self._everybodys = base.parent
        self.packages = self._everybodys / "packages"
        self.run, self.data = base / "run", base / "data"
        self._started: list[subprocess.Popen[str]] = []
        self._homes: set[int] = set()

    # ---------------------------------------------------------------- processes

    def environment(self, uid: int) -> dict[str, str]:
        """Return the environment of a user's programs."""
        home = self.base / f"home-{uid}"
        if uid not in self._homes:
            home.mkdir(mode=0o700, exist_ok=True)
            os.chown(home, uid, uid)
            self._homes.add(uid)
        found = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(home),
            "PYTHONPATH": str(self.packages),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "JUPYTER_SING_SYSTEM_DIR": str(self.run),
        }
        if (library := self._everybodys / "python" / "lib").is_dir():
            found["LD_LIBRARY_PATH"] = str(library)
        return found

    def start(
        self, uid: int, *command: str, groups: Sequence[int] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """Start Python as a user in groups; its output is piped."""
        process = subprocess.Popen(
            [str(self.python), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            user=uid,
            group=uid,
            extra_groups=list(groups),
            cwd="/",
            env={**self.environment(uid), **variables},
        )
        self._started.append(process)
        return process

    def program(self, uid: int, text: str, *arguments: str) -> str:
        """Run a program as a user; return its output."""
        return finish(self.start(uid, "-c", text, *arguments))

    def sing(self, uid: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``jupyter sing`` as a user."""
        program = ("-m", "jupyter_sing.cli", *command)
        process = self.start(uid, *program, groups=(), **variables)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def status(self, uid: int) -> list[dict[str, Any]]:
        """Return all sessions as a user sees them."""
        found: list[dict[str, Any]] = json.loads(self.sing(uid, "status", "--json").stdout)[
            "sessions"
        ]
        return found

    def end_programs(self) -> None:
        """Kill the started programs that still run."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()
        self._started.clear()

    # ---------------------------------------------------------------- the daemon

    def start_daemon(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Start the daemon as root."""
        return self.sing(
            0, "daemon", "--system", *arguments,
            JUPYTER_SING_DATA_DIR=str(self.data), JUPYTER_SING_DEVICES="cpu:1GiB@1", **variables,
        )  # fmt: skip

    def end(self, users: Sequence[int]) -> None:
        """Stop it, and check that no process of these users is left."""
        self.end_programs()
        assert self.sing(0, "stop", "--no-checkpoint").returncode == 0
        deadline = time.monotonic() + WAIT_SECONDS
        while left := [pid for uid in users for pid in processes_of(uid)]:
            assert time.monotonic() < deadline, f"processes outlived their daemon: {left}"
            time.sleep(0.05)

    def log(self) -> str:
        """Return the daemon's log."""
        return (self.data / "daemon" / "agent.log").read_text()


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a program, which must succeed; return its output."""
    out, err = process.communicate(timeout=WAIT_SECONDS * 3)
    assert process.returncode == 0, err[-4000:]
    return out


def processes_of(uid: int) -> list[int]:
    """Return the processes whose real, effective, saved or file system uid is this user."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            lines = (path / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        uids = next(line for line in lines if line.startswith("Uid:")).split()[1:]
        if str(uid) in uids:
            found.append(int(path.name))
    return found
