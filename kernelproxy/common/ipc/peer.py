"""As whom the processes of a session run, under a daemon that serves several users.

The system daemon is root and executes nothing of its users: whatever is theirs (an interpreter, its
torch, a build of the native part) is executed by processes that have become them before, with the
user, the groups and nothing else of who opened the session.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelproxy.common.errors import ControlError

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # Python has no name for it
_GROUPS_MAX = 256  # of getsockopt's 1024 bytes
_PATH_BYTES_MAX = 4096
#: What processes of users get of the daemon's environment, beside what begins with a prefix.
_PASSED = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "JUPYTER_SING_ANY_TORCH")
_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "TORCH_")


@dataclass(frozen=True)
class Owner:
    """A user with groups and a home directory, which is a variable for his processes alone.

    Parameters
    ----------
    uid, gid : int
    groups : tuple of int
        The supplementary ones.
    home : str
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = "/"

    @classmethod
    def at(cls, sock: socket.socket) -> Owner:
        """Who connected a socket, as the kernel knows him."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(raw)
        try:
            groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
        except OSError as error:  # more of them than fit: then with less rights, not with others
            log.warning("User %d is known by no supplementary groups: %s", uid, error)
            groups = b""
        return cls(uid, gid, tuple(each[0] for each in struct.iter_unpack("I", groups)))

    def of_home(self, home: str) -> Owner:
        """The same with the home directory that he says he has.

        Raises
        ------
        ControlError
            If it is no path.
        """
        check_path(home or "/")
        return replace(self, home=home or "/")

    @classmethod
    def adopt(cls, record: dict[str, Any]) -> Owner:
        """The one of whom `dataclasses.asdict` has made a record."""
        return cls(**{**record, "groups": tuple(record["groups"])})

    def environment(self) -> dict[str, str]:
        """Variables for his processes: his home, and what concerns devices."""
        found = {k: v for k, v in os.environ.items() if k in _PASSED or k.startswith(_PREFIXES)}
        return {**found, "HOME": self.home}

    def process(self) -> dict[str, Any]:
        """What `subprocess.Popen` needs to become him before it executes anything."""
        return {
            "user": self.uid,
            "group": self.gid,
            # Never none at all: Python 3.12.0 would leave him root's (CVE-2023-6507).
            "extra_groups": list(self.groups) or [self.gid],
            "umask": 0o022,
        }


def peer_of(sock: socket.socket) -> int:
    """Number of the user at the other end, as the kernel knows him."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


def check_path(text: str) -> None:
    """Raise ControlError if a text cannot be an absolute path."""
    if not os.path.isabs(text) or "\0" in text or len(os.fsencode(text)) > _PATH_BYTES_MAX:
        raise ControlError(f"{text[:100]!r} is no absolute path.", "bad-request")


def check_forked(pidfd: int, pid: int, parent: int, uid: int) -> bool:
    """Whether a descriptor is of a process that a user's process has forked, and that is his.

    Whoever sends a descriptor of a process may send that of any: what is done with it by root must
    be what its sender could do himself.

    Parameters
    ----------
    pidfd, pid : int
        The descriptor, and what its sender says of it.
    parent : int
        Who has forked it.
    uid : int
    """
    try:
        if _pid_of(pidfd) != pid or pid <= 0:
            return False
        status = _status_of(pid)
        same = _pid_of(pidfd) == pid  # it was still there, so that was its status
        return same and status["PPid"] == [parent] and status["Uid"] == [uid] * 4
    except (OSError, KeyError, ValueError):
        return False


def _pid_of(pidfd: int) -> int:
    return _fields(Path(f"/proc/self/fdinfo/{pidfd}").read_text(), ("Pid",))["Pid"][0]


def _status_of(pid: int) -> dict[str, list[int]]:
    return _fields(Path(f"/proc/{pid}/status").read_text(), ("PPid", "Uid"))


def _fields(text: str, names: Sequence[str]) -> dict[str, list[int]]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name: [int(each) for each in rest.split()] for name, _, rest in lines if name in names}
