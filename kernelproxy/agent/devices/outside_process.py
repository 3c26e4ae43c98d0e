"""A process that uses a device and is no worker: whose it is, and what it runs."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

#: Longest description of a command, in characters.
_COMMAND_MAX = 60


@dataclass(frozen=True)
class OutsideProcess:
    """A process outside of all sessions that uses a device.

    Parameters
    ----------
    pid : int
    memory : int or None
        Bytes of the device; None if the driver does not tell.
    user, command : str
        Name of its user; its program, and the script that an interpreter runs. Arguments are left
        out, as they may be secret. "?" if it cannot be seen from here.
    """

    pid: int
    memory: int | None
    user: str
    command: str

    @classmethod
    def of(cls, pid: int, memory: int | None) -> OutsideProcess:
        """Describe a process."""
        directory = Path(f"/proc/{pid}")
        try:
            uid = directory.stat().st_uid
            words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            name = (directory / "comm").read_text(errors="replace").strip()
        except OSError:  # it has ended, or is in a PID namespace that is not seen from here
            return cls(pid, memory, "?", "?")
        return cls(pid, memory, _user(uid), _command(words, name))


def _command(words: list[str], name: str) -> str:
    program = os.path.basename(words[0]) or name
    script = words[1] if program.startswith("python") and len(words) > 1 else ""
    if script and not script.startswith("-"):
        program = f"{program} {os.path.basename(script)}"
    return program[:_COMMAND_MAX]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
