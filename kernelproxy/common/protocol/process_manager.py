"""Messages between the agent and the process manager of a kernel: see `kernelproxy.criu`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.common.protocol.base import Message


@dataclass(frozen=True)
class Tend(Message, kind="Tend"):
    """Sent by a kernel's process manager, once per connection, which then carries commands.

    Answered by `Done`. The agent sends the commands `HoldRequests`, `LetThrough`, `Dump`, `Revive`,
    `CommitReplace` and `Replace`, one at a time; each has a reply.

    Parameters
    ----------
    session : str
    """

    session: str


@dataclass(frozen=True)
class HoldRequests(Message, kind="Hold"):
    """Command: hold back requests to the kernel.

    Answered by `Done` when the kernel has finished the earlier ones. If it has not in time, the
    reply is `Error` (``busy``), and requests go through again.

    Parameters
    ----------
    seconds : float
        Time limit.
    """

    seconds: float


@dataclass(frozen=True)
class LetThrough(Message, kind="LetThrough"):
    """Command: let requests through again; answered by `Done`."""


@dataclass(frozen=True)
class Dump(Message, kind="Dump"):
    """Command: save the kernel's process; answered by `Dumped`.

    If that fails, the process continues.

    Parameters
    ----------
    directory : str
        An empty directory for the images.
    wake_fd : int
        See `Left`.
    leave_running : bool
        Whether the process continues afterwards; otherwise it ends.
    """

    directory: str
    wake_fd: int
    leave_running: bool


@dataclass(frozen=True)
class Dumped(Message, kind="Dumped"):
    """Reply: the images are written.

    Parameters
    ----------
    seconds : float
        How long the process was stopped.
    """

    seconds: float


@dataclass(frozen=True)
class Revive(Message, kind="Revive"):
    """Command: restore a process from images; answered by `Revived`.

    Parameters
    ----------
    directory : str
        Directory of the images; it is not changed.
    session : str
        The session that the process joins.
    beside : bool
        Whether the kernel has a current process, which stays until `Replace`.
    """

    directory: str
    session: str
    beside: bool


@dataclass(frozen=True)
class Revived(Message, kind="Revived"):
    """Reply: the restored process runs.

    Parameters
    ----------
    pid : int
        Its process id in the agent's namespace.
    """

    pid: int


@dataclass(frozen=True)
class CommitReplace(Message, kind="Promise"):
    """Command: carry out `Replace` even if the connection ends before that command comes.

    The kernel is about to be notified that it is replaced, and executes nothing after that.
    Answered by `Done`.
    """


@dataclass(frozen=True)
class Replace(Message, kind="Replace"):
    """Command: replace the current process by the restored one; answered by `Done`.

    This happens as soon as the current process has answered the request that it executes. Requests
    that it has not begun go to the new process.
    """


@dataclass(frozen=True)
class Knock(Message, kind="Knock"):
    """Notification from a process manager: a request waits for a kernel that hibernates."""


@dataclass(frozen=True)
class Leave(Message, kind="Leave"):
    """Command to a kernel: detach from the session's memory and this connection for a while.

    Answered by `Left`, or by `Error` if it cannot.
    """


@dataclass(frozen=True)
class Left(Message, kind="Left"):
    """Last message over this connection. The kernel reattaches when it is woken.

    Parameters
    ----------
    wake_fd : int
        Number, in the kernel, of the write end of a pipe, on which the kernel waits for a line of
        JSON: see `kernelproxy.kernel.activation.agent_connection`.
    """

    wake_fd: int


@dataclass(frozen=True)
class Stay(Message, kind="Stay"):
    """Notification to a kernel: it does not detach after all. Has no reply.

    `CheckpointBegun` had notified the kernel that it would detach.
    """
