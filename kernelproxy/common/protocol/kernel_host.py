"""Messages between a Jupyter server and the kernel host: see `kernelproxy.kernel_host`.

Each connection belongs to one kernel. If it ends without `CloseKernel`, the server has left the
kernel, which continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message


@dataclass(frozen=True)
class StartKernel(Message, kind="StartKernel"):
    """Start a kernel; answered by `KernelState`. Two descriptors come with it: the kernel's
    standard output and error.

    Parameters
    ----------
    kernel_id : str
        Jupyter's id of the kernel.
    command : list of str
    env : dict
        Its complete environment.
    cwd : str
    keep : float
        Seconds that the kernel lives without a server.
    session : str
        Id of its session, or "".
    tended : dict or None
        The arguments of `kernelproxy.kernel_host.process_manager.ProcessManager`, if the kernel's
        process must be one that can be saved.
    """

    kernel_id: str
    command: list[str]
    env: dict[str, str]
    cwd: str
    keep: float
    session: str
    tended: dict[str, Any] | None = None
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class AdoptKernel(Message, kind="AdoptKernel"):
    """Take over a kernel whose server has left it; answered by `KernelState`.

    Parameters
    ----------
    kernel_id : str
    keep : float
        As for `StartKernel`.
    wait : float
        Seconds to wait until its server has left. If the server was just killed, the kernel host
        may not have noticed it yet.
    """

    kernel_id: str
    keep: float
    wait: float = 0.0


@dataclass(frozen=True)
class AskKernel(Message, kind="AskKernel"):
    """Request the state of the connection's kernel; answered by `KernelState`."""


@dataclass(frozen=True)
class SignalKernel(Message, kind="SignalKernel"):
    """Send a signal to the connection's kernel. Has no reply.

    Parameters
    ----------
    number : int
    """

    number: int


@dataclass(frozen=True)
class ShutDownKernel(Message, kind="ShutDownKernel"):
    """Notification that the connection's kernel was asked to end, see `ProcessManager.shut_down`.

    Has no reply.
    """


@dataclass(frozen=True)
class CloseKernel(Message, kind="CloseKernel"):
    """End the connection's kernel, and free its resources; answered by `KernelState`."""


@dataclass(frozen=True)
class KernelState(Message, kind="KernelState"):
    """State of a kernel; also sent once without a request, when the kernel has ended.

    Parameters
    ----------
    pid : int
        Its process id; 0: it hibernates.
    session : str
        Id of its session: a different one after its process was replaced.
    code : int or None
        Exit code, as returned by `subprocess.Popen.poll`; None: it has not ended.
    """

    pid: int
    session: str
    code: int | None


@dataclass(frozen=True)
class EndKernels(Message, kind="EndKernels"):
    """End all kernels that have no server; answered by `Done` when they have ended."""
