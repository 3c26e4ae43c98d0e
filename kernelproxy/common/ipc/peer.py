"""Users as which a session's processes run, under a daemon that serves several users.

The system daemon runs as root and executes no code of its users. Their code (an interpreter, its
torch, a build of the native part) is executed by processes that have dropped privileges before:
they have the uid and groups of the user who opened the session, and no other privileges.
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
from kernelproxy.common.options import ANY_TORCH

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # Python has no name for it
_GROUPS_MAX = 256  # of getsockopt's 1024 bytes
_PATH_BYTES_MAX = 4096
#: Variables of the daemon's environment that users' processes get, besides those with a prefix.
_PASSED = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", ANY_TORCH.variable)
_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "TORCH_")


@dataclass(frozen=True)
class Owner:
    """A user with groups and a home directory.

    Parameters
    ----------
    uid, gid : int
    groups : tuple of int
        Supplementary groups.
    home : str
        Only used as a variable of the user's processes.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = "/"

    @classmethod
    def at(cls, sock: socket.socket) -> Owner:
        """Return the user who connected to a socket, from the peer credentials."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(raw)
        try:
            groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
        except OSError as error:  # too many: then with fewer rights, not with wrong ones
            log.warning("User %d is known by no supplementary groups: %s", uid, error)
            groups = b""
        return cls(uid, gid, tuple(each[0] for each in struct.iter_unpack("I", groups)))

    def of_home(self, home: str) -> Owner:
        """Return a copy with the home directory that the user has sent.

        Raises
        ------
        ControlError
            If it is not an absolute path.
        """
        check_path(home or "/")
        return replace(self, home=home or "/")

    @classmethod
    def adopt(cls, record: dict[str, Any]) -> Owner:
        """Recreate an owner from a record made by `dataclasses.asdict`."""
        return cls(**{**record, "groups": tuple(record["groups"])})

    def environment(self) -> dict[str, str]:
        """Return the environment of the user's processes: their home, and allowed variables."""
        found = {k: v for k, v in os.environ.items() if k in _PASSED or k.startswith(_PREFIXES)}
        return {**found, "HOME": self.home}

    def process(self) -> dict[str, Any]:
        """Return the arguments of `subprocess.Popen` that start a process as this user."""
        return {
            "user": self.uid,
            "group": self.gid,
            # Never empty: Python 3.12.0 would then leave root's groups (CVE-2023-6507).
            "extra_groups": list(self.groups) or [self.gid],
            "umask": 0o022,
        }


def peer_of(sock: socket.socket) -> int:
    """Return the uid of the peer, from the peer credentials."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


def check_path(text: str) -> None:
    """Raise ControlError if a text cannot be an absolute path."""
    if not os.path.isabs(text) or "\0" in text or len(os.fsencode(text)) > _PATH_BYTES_MAX:
        raise ControlError(f"{text[:100]!r} is no absolute path.", "bad-request")


def check_forked(pidfd: int, pid: int, parent: int, uid: int) -> bool:
    """True if a pidfd is of a process that `parent` has forked, and that runs as user `uid`.

    A sender may send the pidfd of any process. Root must do with it only what the sender could do
    without root.

    Parameters
    ----------
    pidfd, pid : int
        The descriptor, and the process id that its sender claims.
    parent : int
        Process that must have forked it.
    uid : int
    """
    try:
        if _pid_of(pidfd) != pid or pid <= 0:
            return False
        status = _status_of(pid)
        same = _pid_of(pidfd) == pid  # it still lives, so this is its status
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
