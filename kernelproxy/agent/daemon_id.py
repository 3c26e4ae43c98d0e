"""Ownership tags for files on disk, so that a daemon can remove those of a dead daemon."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DaemonId:
    """The tag of a daemon: of a runtime directory, and of all agents that succeed each other there.

    Parameters
    ----------
    runtime : Path
        Its runtime directory. Its ``agent.lock`` is held while the agent or its supervisor lives.
    """

    def __init__(self, runtime: Path) -> None:
        self.record = {
            "host": socket.gethostname(),
            "boot": _BOOT_ID.read_text().strip(),
            "runtime": str(runtime),
        }
        #: Part of a file name that identifies this daemon.
        self.key = hashlib.sha256(f"{self.record['host']} {runtime}".encode()).hexdigest()[:16]

    def is_ours(self, record: Any) -> bool:
        """Return True if a record is this daemon's, also from before the machine's last boot."""
        same = ("host", "runtime")
        return isinstance(record, dict) and all(
            record.get(each) == self.record[each] for each in same
        )

    def is_orphan(self, record: Any) -> bool:
        """Return True if a record is of another daemon that, as far as visible here, is gone."""
        if self.is_ours(record):
            return False
        try:
            if record["host"] != self.record["host"]:
                return False  # a home directory that several hosts share
            if record["boot"] != self.record["boot"]:
                return True
            lock = os.open(Path(record["runtime"]) / "agent.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except (OSError, KeyError, TypeError):
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True
