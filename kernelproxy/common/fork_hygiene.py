"""Closing of inherited descriptors in forked children that do not start another program.

Such children have copies of all descriptors. Without this, a port would stay in use, a client would
wait for a peer that has disconnected, and a sandbox would believe that its server is alive.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Iterable
from typing import Protocol


class DescriptorOwner(Protocol):
    """Owner of descriptors."""

    def disown(self) -> None:
        """Called in a forked child: give up the descriptors."""


_owners: weakref.WeakSet[DescriptorOwner] = weakref.WeakSet()


def register(owner: DescriptorOwner) -> None:
    """Register an owner, whose `disown` is called in forked children; it is held weakly."""
    _owners.add(owner)


def redirect_to_null(fds: Iterable[int]) -> None:
    """Redirect descriptors to ``/dev/null``.

    Their numbers stay in use, so that code which still knows a number cannot reach another file.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        if fd >= 0:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def sockets_at(ports: Iterable[int]) -> list[int]:
    """Return the descriptors of this process's TCP sockets that are bound to the given ports."""
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
