"""Reserved ports: those of a kernel, from their choice until the kernel has ended.

Jupyter chooses free ports, and the kernel listens on them seconds later; meanwhile any other
process or outgoing connection may get them (jupyter_client#487), and the kernel dies. A socket that
is bound but does not listen prevents that. It does not hinder the kernel: ZeroMQ, like most
servers, sets SO_REUSEADDR.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Protocol

from kernelproxy.zmq_proxy.connection import CHANNELS


class _Manager(Protocol):
    ip: str


class ReservedPorts:
    """Ports of one kernel that no other process and no connection can get."""

    def __init__(self) -> None:
        self._held: list[int] = []
        # A kernel manager whose kernel has died may be dropped without a cleanup.
        weakref.finalize(self, _close, self._held)

    def reserve(self, manager: _Manager) -> None:
        """Choose free ports for a kernel manager, and reserve them in place of those before.

        Raises
        ------
        OSError
            If there are not enough, or too many files are open.
        """
        self.release()
        ports = []
        try:
            for _ in CHANNELS:
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind((manager.ip, 0))
                    ports.append(sock.getsockname()[1])
                    self._held.append(sock.detach())
        except OSError:
            self.release()
            raise
        for channel, port in zip(CHANNELS, ports, strict=True):
            setattr(manager, f"{channel}_port", port)

    def release(self) -> None:
        """Release the ports; idempotent."""
        _close(self._held)


def _close(held: list[int]) -> None:
    while held:
        os.close(held.pop())
