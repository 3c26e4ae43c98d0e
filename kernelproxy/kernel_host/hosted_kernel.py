"""One kernel of the attendant's: in a sandbox, with a tender, or an ordinary child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kernelproxy.common.protocol import StartKernel

if TYPE_CHECKING:
    from kernelproxy.kernel_host.process_manager import Tender

#: Seconds for a killed kernel to end.
END_SECONDS = 10.0


class Kernel(Protocol):
    """What the attendant, and in a server without one the provisioner, does with a kernel."""

    @property
    def session(self) -> str:
        """Id of its session: another one after its process was replaced."""

    @property
    def pid(self) -> int:
        """Its process; 0 while it hibernates."""

    def poll(self) -> int | None:
        """Return how it has ended; None if it has not."""

    def signal(self, number: int) -> None:
        """Send a signal to it and what it has started."""

    def shut_down(self) -> None:
        """It was asked to end."""

    def close(self) -> None:
        """End it, and free what it has. Doing it twice is no error."""


class Plain:
    """A kernel that is an ordinary child of this process.

    Parameters
    ----------
    process : Popen
        Leads a session of its own.
    session : str
    """

    def __init__(self, process: subprocess.Popen[bytes], session: str) -> None:
        self.session = session
        self._process = process

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return how it has ended; None if it has not."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self._process.poll() is None:  # else the number may be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def shut_down(self) -> None:
        """It was asked to end, and does so itself."""

    def close(self) -> None:
        """End it. Doing it twice is no error."""
        self.signal(signal.SIGKILL)
        self._process.wait(END_SECONDS)


def start(request: StartKernel, outlets: Sequence[int]) -> Kernel:
    """Start a kernel. If that fails, nothing is left of it.

    Parameters
    ----------
    request : StartKernel
    outlets : sequence of int
        Descriptors of its standard output and error, which stay the caller's.

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
        process.stdin.close()  # there is nothing to be read
        return process

    if request.tended is None:
        env = {**request.env, "JPY_PARENT_PID": str(os.getpid())}
        return Plain(launch(request.command), request.session)
    # Its parent is process 1 of the sandbox, which ends with us; without a parent it would take
    # itself for one that was started in a terminal.
    env = {**request.env, "JPY_PARENT_PID": "1"}
    tender = _tender(request)
    command = [
        text.replace(request.tended["file"], tender.connection_file) for text in request.command
    ]
    tender.start(command, launch, outlets)
    return tender


def _tender(request: StartKernel) -> Tender:
    # Not above: without it, the attendant is a fifth of the size.
    from kernelproxy.criu.sandbox import Form
    from kernelproxy.kernel_host.process_manager import Tender

    assert request.tended is not None
    given = request.tended
    return Tender(
        Form(**given["form"]), request.session, given["info"],
        os.path.basename(given["file"]), given["socket"],
    )  # fmt: skip
