"""Between the agent and its keeper: first `Keep`, then `KeepDevice` and deposits.

To the next agent the keeper says the same, and `Done` behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message


@dataclass(frozen=True)
class Keep(Message, kind="Keep"):
    """Who the two are; comes with the daemon's lock, its listening socket and the sender's pidfd.

    Parameters
    ----------
    command : list of str
        What starts the next agent; the number of its connection is put behind it.
    socket : str
        Path of the listening socket.
    """

    command: list[str]
    socket: str


@dataclass(frozen=True)
class KeepDevice(Message, kind="KeepDevice"):
    """A GPU is the daemon's; comes with the descriptor that locks it.

    Parameters
    ----------
    node : str
        See `Device.node`.
    """

    node: str


@dataclass(frozen=True)
class Deposit(Message, kind="Deposit"):
    """What a session is made of, in place of what was deposited for it before.

    Parameters
    ----------
    session : str
    record : dict
        See `Session.record`.
    names : list of str
        What the descriptors are that come with it. ``agent`` is the agent page, and each
        ``process`` the pidfd of a worker.
    """

    session: str
    record: dict[str, Any]
    names: list[str]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Withdraw(Message, kind="Withdraw"):
    """A session has ended: nothing of it is to be kept."""

    session: str


@dataclass(frozen=True)
class Farewell(Message, kind="Farewell"):
    """The agent leaves, and nobody is to take its place; answered by the keeper's end."""
