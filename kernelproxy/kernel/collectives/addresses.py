"""Addresses at which the endpoint of a rank listens: on its host, and for other hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Any

BACKLOG = 4096


def listener(family: int, address: str | tuple[str, int]) -> socket.socket:
    """Return a socket that listens at an address and does not block."""
    made = socket.socket(family)
    made.bind(address)
    made.listen(BACKLOG)
    made.setblocking(False)
    return made


def connect(place: dict[str, Any]) -> socket.socket | None:
    """Return a connection to the endpoint at a place, or None if its process has ended."""
    local = place.get("host") == host_identity()
    if not local and "tcp" not in place:
        return None  # it listens on its own host only
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
    try:
        if local:
            connection.connect(f"\0jupyter-sing-rank-{place['token']}")
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


def host_identity() -> str:
    """Return the identity of the host, as far as its abstract sockets reach."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def reachable_address() -> str:
    """Return the address of this host on the way to the ranks' meeting point."""
    meeting = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"
