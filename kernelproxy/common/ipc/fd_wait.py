"""Waiting for descriptors."""

from __future__ import annotations

import select


def readable(fd: int, seconds: float) -> bool:
    """Wait until something can be read, or the other end is closed; return whether it is so.

    Unlike `select.select` of any descriptor: a server with many kernels has thousands of them.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1e3))
