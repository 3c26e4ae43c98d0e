"""TCP ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Return unused ports outside the range that the system assigns.

    A server binds its port seconds after it was chosen here. Meanwhile, the system would assign a
    port of its own range to a connection or to another server.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return [*found]
