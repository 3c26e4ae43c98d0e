"""Directories of process images: one for each process that is being saved, or that hibernates.

They lie beside the states on disk, readable for their owner alone, since they hold all that a
process had in memory. A daemon's are in a directory of its own, which says whose it is: what a
daemon left that died for good is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

#: What CRIU writes last: the images are complete when it is there.
COMPLETE = "inventory.img"
_OWNER = "owner.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ImageDirectories:
    """Makes and removes them; all methods block.

    Parameters
    ----------
    root : Path
        Of all daemons' images; made at first need.
    runtime : Path
        Runtime directory of this daemon, whose ``agent.lock`` is held while it or its keeper lives.
    """

    def __init__(self, root: Path, runtime: Path) -> None:
        self._root = root
        self._owner = {
            "host": socket.gethostname(),
            "boot": _BOOT_ID.read_text().strip(),
            "runtime": str(runtime),
        }
        key = hashlib.sha256(f"{self._owner['host']} {runtime}".encode()).hexdigest()[:16]
        self._ours = root / key

    def make(self, session: str) -> Path:
        """Make an empty directory; raises OSError."""
        self._ours.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self._ours / _OWNER
        if not owner.exists():
            temporary = owner.with_suffix(f".{secrets.token_hex(4)}")
            temporary.write_text(json.dumps(self._owner))
            temporary.rename(owner)
        found = self._ours / f"{session}-{secrets.token_hex(4)}"
        found.mkdir(mode=0o700)
        return found

    def remove(self, directory: Path) -> None:
        """Remove one; if it is gone, or cannot be removed now, the next daemon sees to it."""
        if directory.parent == self._ours:
            shutil.rmtree(directory, ignore_errors=True)

    def tidy(self, kept: Iterable[Path]) -> None:
        """Remove what daemons left that are gone, and of ours all but `kept`."""
        keep = set(kept)
        for daemon in _listed(self._root):
            if daemon == self._ours:
                for each in _listed(daemon):
                    if each not in keep and each.name != _OWNER:
                        shutil.rmtree(each, ignore_errors=True)
            elif self._is_orphan(daemon):
                shutil.rmtree(daemon, ignore_errors=True)

    def _is_orphan(self, daemon: Path) -> bool:
        """Whether the daemon of a directory is gone for good, as far as can be told from here."""
        try:
            owner = json.loads((daemon / _OWNER).read_text())
            if owner["host"] != self._owner["host"]:
                return False  # a home that several hosts share
            if owner["boot"] != self._owner["boot"]:
                return True
            lock = os.open(Path(owner["runtime"]) / "agent.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return (daemon / _OWNER).exists()  # without one it is being made
        except (OSError, ValueError, KeyError, TypeError):
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True


def _listed(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(directory.iterdir())
    return []
