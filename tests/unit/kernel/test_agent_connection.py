"""A kernel's connection to one daemon after the other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Attach, Attached, Bell
from kernelproxy.kernel.activation.agent_connection import Link

SECONDS_MAX = 30.0
HELLO = Attach("s1", "2.13.0")


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Return a daemon's socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "agent.sock"))
        sock.listen()
        sock.settimeout(SECONDS_MAX)
        yield sock


def attach(listener: socket.socket) -> socket.socket:
    """Accept a connection, and receive the kernel's hello."""
    sock, _ = listener.accept()
    sock.settimeout(SECONDS_MAX)
    assert recv_message(sock)[0] == HELLO
    return sock


def test_a_daemon_that_dies_right_after_its_reply_is_followed_by_the_next(
    listener: socket.socket,
) -> None:
    gone = threading.Event()
    link = Link(-1, HELLO, Path(listener.getsockname()), gone.set)
    link.start()
    with contextlib.closing(attach(listener)) as first:
        first.shutdown(socket.SHUT_RD)  # it has died before the kernel rings
        send_message(first, Attached("s1"))
    with contextlib.closing(attach(listener)) as second:
        send_message(second, Attached("s1"))
        assert recv_message(second)[0] == Bell()
        assert not gone.is_set()
        link.end()
