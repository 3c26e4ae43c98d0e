"""Kernel in the kernel host: in a sandbox with a process manager, or an ordinary child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kernelproxy.common.protocol import StartKernel

if TYPE_CHECKING:
    from kernelproxy.kernel_host.process_manager import ProcessManager

#: Seconds for a killed kernel to end.
END_SECONDS = 10.0


class HostedKernel(Protocol):
    """Interface of a kernel to the kernel host, or to the provisioner in a server without one."""

    @property
    def session(self) -> str:
        """Id of its session; changes when its process is replaced."""

    @property
    def pid(self) -> int:
        """Process id; 0 while it hibernates."""

    def poll(self) -> int | None:
        """Return its exit status; None if it has not ended."""

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and the processes that it has started."""

    def shut_down(self) -> None:
        """Report that the kernel was asked to end."""

    def close(self) -> None:
        """End it, and free its resources. Idempotent."""


class Plain:
    """Kernel that is an ordinary child of this process.

    Parameters
    ----------
    process : Popen
        Process of the kernel; the leader of its own session.
    session : str
    """

    def __init__(self, process: subprocess.Popen[bytes], session: str) -> None:
        self.session = session
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit status; None if it has not ended."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self._process.poll() is None:  # else the number may be reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def shut_down(self) -> None:
        """Do nothing: the kernel was asked to end, and does so itself."""

    def close(self) -> None:
        """End it. Idempotent."""
        self.signal(signal.SIGKILL)
        self._process.wait(END_SECONDS)


def start(request: StartKernel, outlets: Sequence[int]) -> HostedKernel:
    """Start a kernel. If that fails, nothing of it remains.

    Parameters
    ----------
    request : StartKernel
    outlets : sequence of int
        Descriptors of its standard output and error; the caller remains the owner.

    Raises
    ------
    ProcessError, NativeError, OSError
        If it does not start.
    """
    stdout, stderr = outlets

    def launch(command: list[str], fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [os.path.expanduser(each) for each in command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=request.cwd,
            start_new_session=True,
            pass_fds=fds,
        )
        assert process.stdin is not None
        process.stdin.close()  # there is no input
        return process

    if request.tended is None:
        env = {**request.env, "JPY_PARENT_PID": str(os.getpid())}
        return Plain(launch(request.command), request.session)
    # Its parent is process 1 of the sandbox, which ends together with this process. Without the
    # variable the kernel would assume that it was started in a terminal.
    env = {**request.env, "JPY_PARENT_PID": "1"}
    manager = _process_manager(request)
    command = [
        text.replace(request.tended["file"], manager.connection_file) for text in request.command
    ]
    manager.start(command, launch, outlets)
    return manager


def _process_manager(request: StartKernel) -> ProcessManager:
    # Imported here: without it, the kernel host takes a fifth of the memory.
    from kernelproxy.criu.sandbox import Form
    from kernelproxy.kernel_host.process_manager import ProcessManager

    assert request.tended is not None
    given = request.tended
    return ProcessManager(
        Form(**given["form"]), request.session, given["info"],
        os.path.basename(given["file"]), given["socket"],
    )  # fmt: skip
