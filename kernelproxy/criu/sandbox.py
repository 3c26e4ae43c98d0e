"""Sandboxes: the program ``sing-sandbox``, and the commands that start kernels in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Literal

from kernelproxy.common.errors import ProcessError
from kernelproxy.common.ipc.fd_wait import readable
from kernelproxy.native.tools import sandbox_program

REPORT_BYTES_MAX = 4096

Kind = Literal["root", "user"]


@dataclass(frozen=True)
class Form:
    """Method of saving processes.

    Parameters
    ----------
    kind : str
        ``root``: with root's privileges; ``user``: with a user's privileges in a user namespace.
    criu : str
        Path of the program.
    """

    kind: Kind
    criu: str


def prefix(form: Form, report_fd: int, lifeline_fd: int | None = None) -> list[str]:
    """Return a prefix for a command that makes it run in a sandbox.

    The started program waits outside, forwards signals and output, and ends when the command does.
    The command leads a session of its own.

    Parameters
    ----------
    form : Form
    report_fd : int
        Descriptor for the command's process id, see `read_pid`; only the program inherits it.
    lifeline_fd : int, optional
        End of a pipe whose other end the caller keeps: when that is closed, everything in the
        sandbox ends. Default: when the process that started the command ends.

    Raises
    ------
    NativeError
        If the program cannot be built here.
    """
    return [str(sandbox_program()), "start", *options(form, report_fd, lifeline_fd), "--"]


def options(form: Form, report_fd: int, lifeline_fd: int | None) -> list[str]:
    """Return the arguments common to start and restore."""
    found = ["--user"] if form.kind == "user" else []
    found += ["--report", str(report_fd)]
    if lifeline_fd is not None:
        found += ["--lifeline", str(lifeline_fd)]
    return found


def enter(form: Form, pid: int, command: list[str]) -> list[str]:
    """Return a command that runs another in the sandbox of process `pid`, and ends with it."""
    user = ["--user"] if form.kind == "user" else []
    return [str(sandbox_program()), "enter", *user, "--target", str(pid), "--", *command]


def read_pid(fd: int, timeout: float) -> int:
    """Wait until the process in a sandbox runs; return its process id as seen here.

    Parameters
    ----------
    fd : int
        The other end of the report pipe; the caller has closed its own copy of the write end.
    timeout : float
        Seconds.

    Raises
    ------
    ProcessError
        ``unavailable``: it will not run; ``timeout``: it does not run yet.
    """
    deadline = time.monotonic() + timeout
    line = b""
    while not line.endswith(b"\n"):
        if not readable(fd, deadline - time.monotonic()):
            raise ProcessError(f"no process ran in its sandbox in {timeout:.0f} s", "timeout")
        data = os.read(fd, REPORT_BYTES_MAX)
        if not data or len(line) > REPORT_BYTES_MAX:
            raise ProcessError("the sandbox ended before a process ran in it", "unavailable")
        line += data
    text = line.decode(errors="replace").strip()
    if text.startswith("!"):
        raise ProcessError(text.removeprefix("!").strip(), "unavailable")
    return int(text)
