"""Between the agent and a kernel's tender, which has its process: see `kernelproxy.criu`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.common.protocol.base import Message


@dataclass(frozen=True)
class Tend(Message, kind="Tend"):
    """Sent by the tender of a kernel, once per connection, which from then on carries orders.

    Answered by `Done`; the agent sends `Hold`, `LetThrough`, `Dump`, `Revive`, `Promise` and
    `Replace`, one at a time, each of which is answered.

    Parameters
    ----------
    session : str
    """

    session: str


@dataclass(frozen=True)
class Hold(Message, kind="Hold"):
    """Order: let no request through to the kernel; answered by `Done` when it has dealt with those
    before, and by `Error` (``busy``, and requests go through again) if it has not in time.

    Parameters
    ----------
    seconds : float
    """

    seconds: float


@dataclass(frozen=True)
class LetThrough(Message, kind="LetThrough"):
    """Order: let requests through again; answered by `Done`."""


@dataclass(frozen=True)
class Dump(Message, kind="Dump"):
    """Order: save the kernel's process; answered by `Dumped`. If that fails, the process goes on.

    Parameters
    ----------
    directory : str
        Empty, for the images.
    wake_fd : int
        See `Left`.
    leave_running : bool
        Whether the process goes on; else it is gone.
    """

    directory: str
    wake_fd: int
    leave_running: bool


@dataclass(frozen=True)
class Dumped(Message, kind="Dumped"):
    """The images are there.

    Parameters
    ----------
    seconds : float
        How long the process stood still.
    """

    seconds: float


@dataclass(frozen=True)
class Revive(Message, kind="Revive"):
    """Order: make a process of images; answered by `Revived`.

    Parameters
    ----------
    directory : str
        Stays as it is.
    session : str
        The session that the process joins.
    beside : bool
        Whether the kernel's present process stays till `Replace`, or there is none.
    """

    directory: str
    session: str
    beside: bool


@dataclass(frozen=True)
class Revived(Message, kind="Revived"):
    """The process runs.

    Parameters
    ----------
    pid : int
        As the agent sees it.
    """

    pid: int


@dataclass(frozen=True)
class Promise(Message, kind="Promise"):
    """Order: carry out `Replace` also if the connection ends before it comes: the kernel is about
    to hear that it is replaced, and executes nothing from then on. Answered by `Done`.
    """


@dataclass(frozen=True)
class Replace(Message, kind="Replace"):
    """Order: let the revived process take the place of the present one, as soon as the request that
    this executes is answered; what it has not begun is asked of the new one. Answered by `Done`.
    """


@dataclass(frozen=True)
class Knock(Message, kind="Knock"):
    """Sent by a tender unasked: a request waits for a kernel that hibernates."""


@dataclass(frozen=True)
class Leave(Message, kind="Leave"):
    """Sent to a kernel: give up the session's memory and this connection, for a while. Answered by
    `Left`, and by `Error` if it cannot.
    """


@dataclass(frozen=True)
class Left(Message, kind="Left"):
    """The last that comes over this connection. The kernel joins again when it is woken.

    Parameters
    ----------
    wake_fd : int
        Number, in the kernel, of a pipe's writing end: a line of JSON is awaited there, see
        `kernelproxy.kernel.activation.agent_connection`.
    """

    wake_fd: int


@dataclass(frozen=True)
class Stay(Message, kind="Stay"):
    """Sent to a kernel that was told by `CheckpointBegun` that it is going to leave: it does not
    leave after all. Has no answer.
    """
