"""Between a server and the attendant, which has its kernels: see `kernelproxy.kernel_host`.

Each connection is one kernel's, and its end without `CloseKernel` says that the server has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message


@dataclass(frozen=True)
class StartKernel(Message, kind="StartKernel"):
    """Start a kernel; answered by `KernelState`. Two descriptors come with it: its standard output
    and error.

    Parameters
    ----------
    kernel_id : str
        Jupyter's.
    command : list of str
    env : dict
        All of its environment.
    cwd : str
    keep : float
        Seconds for which it lives while it has no server.
    session : str
        Id of its session, or "".
    tended : dict or None
        The arguments of `kernelproxy.kernel_host.process_manager.Tender`, if its process is to be
        one that can be saved.
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
    """Take over a kernel whose server has left; answered by `KernelState`.

    Parameters
    ----------
    kernel_id : str
    keep : float
        As for `StartKernel`.
    wait : float
        Seconds for its server to have left: one that was just killed may not have been missed yet.
    """

    kernel_id: str
    keep: float
    wait: float = 0.0


@dataclass(frozen=True)
class AskKernel(Message, kind="AskKernel"):
    """Ask how the connection's kernel is; answered by `KernelState`."""


@dataclass(frozen=True)
class SignalKernel(Message, kind="SignalKernel"):
    """Send the connection's kernel a signal. Has no answer.

    Parameters
    ----------
    number : int
    """

    number: int


@dataclass(frozen=True)
class ShutDownKernel(Message, kind="ShutDownKernel"):
    """The connection's kernel was asked to end, see `Tender.shut_down`. Has no answer."""


@dataclass(frozen=True)
class CloseKernel(Message, kind="CloseKernel"):
    """End the connection's kernel, and free what it has; answered by `KernelState`."""


@dataclass(frozen=True)
class KernelState(Message, kind="KernelState"):
    """How a kernel is; also sent unasked, once, when it has ended.

    Parameters
    ----------
    pid : int
        Its process; 0: it hibernates.
    session : str
        Id of its session: another one after its process was replaced.
    code : int or None
        How it has ended, as `subprocess.Popen.poll` says it; None: it has not.
    """

    pid: int
    session: str
    code: int | None


@dataclass(frozen=True)
class EndKernels(Message, kind="EndKernels"):
    """End all kernels that have no server; answered by `Done` when that is done."""
