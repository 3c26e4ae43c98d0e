"""Wait for a descriptor."""

from __future__ import annotations

import select


def readable(fd: int, seconds: float) -> bool:
    """Wait until data can be read or the peer has disconnected; return False at the timeout.

    Unlike `select.select`, it has no upper bound on the descriptor's number: a server with many
    kernels has thousands of descriptors.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1e3))
