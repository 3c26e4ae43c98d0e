"""Policy of a server: keep its kernels when it ends or not; read by its provisioners.

Only the server extension enables it, for the server's own kernels: kernels that other programs
start (`jupyter execute`, a script) should end with their program.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import StartKernel
from kernelproxy.criu.sandbox import Form
from kernelproxy.kernel_host.client import RemoteKernel, start
from kernelproxy.kernel_host.server_records import KernelRecord, ServerDirectory

#: Arguments that the kernel host supports. With others, the kernel is a child of the server.
_KNOWN = {"env", "cwd", "stdin", "stdout", "stderr", "independent", "kernel_id", "extra_arguments"}


@dataclass
class Keeping:
    """Server that keeps its kernels.

    Parameters
    ----------
    directory : ServerDirectory
    seconds : float
        How long they live without a server.
    """

    directory: ServerDirectory
    seconds: float
    #: Kernels to be adopted at their next start.
    adopted: dict[str, tuple[KernelRecord, RemoteKernel]] = field(default_factory=dict)

    def start(
        self,
        record: KernelRecord,
        command: list[str],
        file: str,
        kwargs: Mapping[str, Any],
        form: Form | None,
    ) -> RemoteKernel:
        """Start a kernel in the kernel host, and write its record.

        Parameters
        ----------
        record : Record
        command : list of str
        file : str
            Connection file that is named in the command.
        kwargs : mapping
            Arguments that `jupyter_client.launcher.launch_kernel` would get.
        form : Form, optional
            Method by which its process can be saved.

        Raises
        ------
        ControlError
            ``no-daemon``, ``timeout`` and ``broken``: there is no kernel host; ``unavailable``: it
            cannot start this kernel; else the kernel does not start.
        OSError
            If the record cannot be written.
        """
        if not set(kwargs) <= _KNOWN or kwargs.get("stdin") is not None:
            raise ControlError("it is started in a way of its own", "unavailable")
        managed = None
        if form is not None:
            managed = {
                "form": {"kind": form.kind, "criu": form.criu},
                "info": record.connection, "file": file, "socket": str(paths.socket_path()),
            }  # fmt: skip
        request = StartKernel(
            record.kernel_id, command, dict(kwargs.get("env") or os.environ), record.cwd,
            self.seconds, record.session, managed,
        )  # fmt: skip
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            outlets = [
                _outlet(kwargs.get("stdout"), 1, null),
                _outlet(kwargs.get("stderr"), 2, null),
            ]
            self.directory.write(record)  # before the start: this process may die at any time
            return start(request, outlets)
        finally:
            os.close(null)


def _outlet(given: Any, own: int, null: int) -> int:
    """Return the descriptor for a kernel's output, from an argument of `subprocess.Popen`."""
    if given is None:
        try:
            os.fstat(own)
        except OSError:
            return null
        return own
    if given == subprocess.DEVNULL:
        return null
    fd = given if isinstance(given, int) else given.fileno()
    if fd < 0:
        raise ControlError("another process reads from it by a pipe", "unavailable")
    return int(fd)


_of: WeakKeyDictionary[Any, Keeping] = WeakKeyDictionary()


def switch_on(manager: Any, keeping: Keeping) -> None:
    """Keep the kernels of a `jupyter_client.MultiKernelManager`."""
    _of[manager] = keeping


def switch_off(manager: Any) -> None:
    """Stop keeping: later kernels of the manager end with this process. Idempotent."""
    _of.pop(manager, None)


def of(kernel_manager: Any) -> Keeping | None:
    """Return how a kernel is kept, given its own manager; None if it is not kept."""
    parent = getattr(kernel_manager, "parent", None)
    return None if parent is None else _of.get(parent)
