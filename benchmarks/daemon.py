"""Helpers for the benchmarks' requests to the daemon and to programs under its sessions."""

from __future__ import annotations

from typing import Any, Protocol

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import SessionReply, StatusReply, StatusRequest

MIB = 1 << 20
NAME, SECOND_NAME = "bench", "bench-2"
ORDER_SECONDS = 600.0


class DaemonSide(Protocol):
    """A runner that executes orders."""

    def order(self, do: str, **arguments: Any) -> dict[str, Any]: ...


def session(name: str = NAME) -> dict[str, Any]:
    """Return the state of a session of the benchmark, as the daemon reports it."""
    with agent_client.connect(start=False) as connection:
        reply = connection.expect(StatusReply, StatusRequest())
    (found,) = (each for each in reply.sessions if each["name"] == name)
    return dict(found)


def verb(request: Any) -> dict[str, Any]:
    """Send the daemon a request about a session and return the reply."""
    with agent_client.connect(start=False) as connection:
        return dict(connection.expect(SessionReply, request, ORDER_SECONDS).session)
