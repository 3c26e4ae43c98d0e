"""Records that a server leaves on disk for its successor.

A *server directory* belongs to one server at a time, which holds the lock in it. Its name begins
with a key that the same server has again after a restart. A new server takes the directory of a
dead one with its key, or makes a new directory. It contains the record of each kernel, written
before the kernel is started and removed when the kernel has ended for good, and Jupyter's table of
sessions.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kernelproxy.common import fork_hygiene, paths
from kernelproxy.common.errors import SingError
from kernelproxy.common.untrusted import parse_json

VERSION = 1
LOCK_NAME, SESSIONS_NAME, SUFFIX = "lock", "sessions.db", ".kernel"
#: Maximum number of concurrent servers with the same key.
_SERVERS_MAX = 100
_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class KernelRecord:
    """Information for adopting a kernel, and for restarting it later.

    Parameters
    ----------
    kernel_id : str
    kernel_name : str
        Name of its specification.
    session : str
        Id of its session, or "".
    notebook : str
        Path of its notebook, or "".
    connection : dict
        Content of its connection file.
    cwd : str
    environment : dict
        Variables that its starter has set to other values than the server's; None: unset. The rest
        is not stored: variables of the server may be secret, or outdated.
    """

    kernel_id: str
    kernel_name: str
    session: str
    notebook: str
    connection: dict[str, Any]
    cwd: str
    environment: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> KernelRecord:
        """Read a record that `ServerDirectory.write` has written.

        Raises
        ------
        ValueError
            If it is damaged, of another version, or of another kernel.
        OSError
            If it cannot be read.
        """
        found = parse_json(path.read_bytes()[: _BYTES_MAX + 1])
        if not isinstance(found, dict) or found.pop("version", None) != VERSION:
            raise ValueError("it is of another version")
        kinds = {each.name: str for each in fields(cls)} | {"connection": dict, "environment": dict}
        if set(found) != set(kinds) or not all(isinstance(found[k], v) for k, v in kinds.items()):
            raise ValueError("it is damaged")
        record = cls(**found)
        if path.name != _file_name(record.kernel_id):
            raise ValueError("it is of another kernel")
        return record

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment requested for the kernel, based on the server's own."""
        changed = {**base, **self.environment}
        return {name: value for name, value in changed.items() if value is not None}


def changes(environ: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str | None]:
    """Return the differences between two environments, see `KernelRecord.environment`."""
    found: dict[str, str | None] = {k: v for k, v in environ.items() if base.get(k) != v}
    return {**found, **{name: None for name in base if name not in environ}}


def key_of(*parts: str) -> str:
    """Return a key from the properties that identify a server after a restart."""
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


class ServerDirectory:
    """Directory of this server, locked; made by `take`.

    Parameters
    ----------
    path : Path
    lock : int
        Descriptor of its lock; takes ownership.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        fork_hygiene.register(self)  # else a forked child would hold the lock, too

    @classmethod
    def take(cls, key: str) -> ServerDirectory:
        """Take the directory of a dead server, or make one.

        Raises
        ------
        ControlError, OSError
            If no directory is available.
        """
        parent = paths.runtime_dir() / "servers"
        parent.mkdir(mode=0o700, exist_ok=True)
        names = [f"{key}-{number}" for number in range(_SERVERS_MAX)]
        # Those with kernels first: the others were left by servers that died without kernels.
        left = {each.parent.name for each in parent.glob(f"{key}-*/*{SUFFIX}")}
        for name in sorted(names, key=lambda name: name not in left):
            path = parent / name
            if (lock := _lock(path)) is not None:
                return cls(path, lock)
        raise SingError(f"{_SERVERS_MAX} servers of the same directory run already.")

    @property
    def sessions_file(self) -> Path:
        """Path of Jupyter's table of sessions. A damaged table is removed."""
        file = self.path / SESSIONS_NAME
        if file.exists():
            try:
                with contextlib.closing(sqlite3.connect(file)) as table:
                    table.execute("SELECT session_id, path, name, type, kernel_id FROM session")
                    (result,) = table.execute("PRAGMA quick_check").fetchone()
            except sqlite3.Error as error:
                result = "no such table" if "no such table" in str(error) else str(error)
            if result not in ("ok", "no such table"):
                for each in self.path.glob(f"{SESSIONS_NAME}*"):
                    each.unlink()
        return file

    def records(self) -> tuple[list[KernelRecord], list[str]]:
        """Return the records left here, and the errors of unreadable ones, which are removed."""
        found, problems = [], []
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            try:
                found.append(KernelRecord.read(path))
            except (OSError, ValueError, TypeError) as error:
                problems.append(f"{path.name}: {error}")
                with contextlib.suppress(OSError):
                    path.unlink()
        return found, problems

    def write(self, record: KernelRecord) -> None:
        """Write a record, readable only by the owner; readers see it complete, or the previous one.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        path = self.path / _file_name(record.kernel_id)
        partial = path.with_suffix(".partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            json.dump({"version": VERSION, **asdict(record)}, file)
        partial.rename(path)

    def remove(self, kernel_id: str) -> None:
        """Remove the record of a kernel, if there is one."""
        with contextlib.suppress(OSError):
            (self.path / _file_name(kernel_id)).unlink()

    def close(self) -> None:
        """Release the directory; without records, it is removed. Idempotent."""
        if self._lock < 0:
            return
        if not any(self.path.glob(f"*{SUFFIX}")):
            with contextlib.suppress(OSError):
                for each in self.path.iterdir():
                    if each.name != LOCK_NAME:
                        each.unlink()
                (self.path / LOCK_NAME).unlink()  # from here on another server may take it
                self.path.rmdir()
        os.close(self._lock)
        self._lock = -1

    def disown(self) -> None:
        """Called in a forked child: release its copy of the lock."""
        fork_hygiene.redirect_to_null([self._lock])


def _lock(path: Path) -> int | None:
    """Take the lock in a directory, which is made if missing; None if another server holds it."""
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None  # just removed by the previous holder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (path / LOCK_NAME).stat()):
            return lock
    except OSError:  # or it was removed meanwhile
        pass
    os.close(lock)
    return None


def _file_name(kernel_id: str) -> str:
    """Return the name of a kernel's record, for any id."""
    if not re.fullmatch(r"[\w-]{1,100}", kernel_id, re.ASCII):
        kernel_id = hashlib.sha256(os.fsencode(kernel_id)).hexdigest()[:32]
    return kernel_id + SUFFIX
