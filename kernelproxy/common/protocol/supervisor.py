"""Messages between the agent and its supervisor: first `Keep`, then `KeepDevice` and `Deposit`.

The supervisor sends the same messages to the next agent, and then `Done`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message


@dataclass(frozen=True)
class Keep(Message, kind="Keep"):
    """First message; comes with the daemon's lock, its listening socket and the sender's pidfd.

    Parameters
    ----------
    command : list of str
        Command that starts the next agent; the number of its connection is appended.
    socket : str
        Path of the listening socket.
    """

    command: list[str]
    socket: str


@dataclass(frozen=True)
class KeepDevice(Message, kind="KeepDevice"):
    """The daemon owns a GPU; comes with the descriptor that locks it.

    Parameters
    ----------
    node : str
        See `Device.node`.
    """

    node: str


@dataclass(frozen=True)
class Deposit(Message, kind="Deposit"):
    """Persist a session's state, in place of what was persisted for it before.

    Parameters
    ----------
    session : str
    record : dict
        See `Session.record`.
    names : list of str
        Kinds of the descriptors that come with it. ``agent`` is the agent page, and each
        ``process`` is the pidfd of a worker.
    """

    session: str
    record: dict[str, Any]
    names: list[str]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Withdraw(Message, kind="Withdraw"):
    """Remove the persisted state of a session that has ended."""

    session: str


@dataclass(frozen=True)
class Farewell(Message, kind="Farewell"):
    """The agent ends and must not be replaced; answered by the end of the supervisor."""
