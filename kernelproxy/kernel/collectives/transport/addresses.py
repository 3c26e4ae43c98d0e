"""Addresses at which the endpoint of a rank listens: on its host, and for other hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from pathlib import Path
from typing import Any

BACKLOG = 4096
#: Of the names of sockets, before the token of an endpoint. `kernelproxy.criu.images` appends to a
#: name when it restores its process, because the original may continue beside it.
PREFIX = "\0jupyter-sing-rank-"


def listener(family: int, address: str | tuple[str, int]) -> socket.socket:
    """Return a socket that listens at an address and does not block."""
    made = socket.socket(family)
    made.bind(address)
    made.listen(BACKLOG)
    made.setblocking(False)
    return made


def local_name(token: str) -> str:
    """Return the name of the socket at which an endpoint listens for ranks of its host."""
    return f"{PREFIX}{token}"


def copy_of(own: socket.socket, token: str) -> str:
    """Return what distinguishes the names of restored processes; "" in all others.

    Ranks that are restored together have the same.

    Parameters
    ----------
    own : socket
        The one at which this process listens for ranks of its host.
    token : str
        Of the endpoint of this process.
    """
    name = own.getsockname()
    name = name.decode() if isinstance(name, bytes) else str(name)
    return name.removeprefix(local_name(token))


def connect(place: dict[str, Any], copy: str = "") -> socket.socket | None:
    """Return a connection to the endpoint at a place, or None if its process has ended.

    Parameters
    ----------
    place : dict
        From `Endpoint.address`.
    copy : str
        See `copy_of`.
    """
    local = place.get("host") == host_identity()
    if not local and "tcp" not in place:
        return None  # it listens on its own host only
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
    try:
        if local:
            connection.connect(local_name(place["token"]) + copy)
        else:
            connection.connect(tuple(place["tcp"]))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of the same user."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


@functools.cache
def host_identity() -> str:
    """Return the identity of the host, as far as its abstract sockets reach.

    Ranks that are restored after a reboot keep the one that they have exchanged.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def reachable_address() -> str:
    """Return the address of this host on the way to the ranks' meeting point."""
    meeting = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"
