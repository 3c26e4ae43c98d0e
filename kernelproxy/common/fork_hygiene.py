"""Children that a server forks without starting another program must not keep what is ours.

They have copies of all descriptors: a port would stay in use, a client would wait for somebody who
has left, and a sandbox would believe that its server lives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Iterable
from typing import Protocol


class Owner(Protocol):
    """Who has descriptors."""

    def disown(self) -> None:
        """Called in a forked child: let go of them."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def register(owner: Owner) -> None:
    """Have somebody called in forked children as long as he is referred to."""
    _owners.add(owner)


def let_go(fds: Iterable[int]) -> None:
    """Give up descriptors, whose numbers stay taken: those who know them must hit nothing else."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        if fd >= 0:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def sockets_at(ports: Iterable[int]) -> list[int]:
    """Descriptors of TCP sockets of this process that are bound to one of some ports."""
    wanted, found = set(ports), []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # such as the one that lists the directory
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.getsockname()[1] in wanted:
                    found.append(fd)
    return found


def _disown() -> None:
    for owner in list(_owners):
        owner.disown()


os.register_at_fork(after_in_child=_disown)
