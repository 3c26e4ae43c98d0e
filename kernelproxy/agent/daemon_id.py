"""Whose something on disk is: what a daemon left there that died, another one removes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Mark:
    """The mark of a daemon: that of a runtime directory, and of all agents that follow each other.

    Parameters
    ----------
    runtime : Path
        Its runtime directory, whose ``agent.lock`` is held while it or its keeper lives.
    """

    def __init__(self, runtime: Path) -> None:
        self.record = {
            "host": socket.gethostname(),
            "boot": _BOOT_ID.read_text().strip(),
            "runtime": str(runtime),
        }
        #: A name for a file.
        self.key = hashlib.sha256(f"{self.record['host']} {runtime}".encode()).hexdigest()[:16]

    def is_ours(self, record: Any) -> bool:
        """Whether a record is this daemon's, also of before the machine was started again."""
        same = ("host", "runtime")
        return isinstance(record, dict) and all(
            record.get(each) == self.record[each] for each in same
        )

    def is_orphan(self, record: Any) -> bool:
        """Whether the daemon of a record is another one, and gone as far as can be told here."""
        if self.is_ours(record):
            return False
        try:
            if record["host"] != self.record["host"]:
                return False  # a home that several hosts share
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
