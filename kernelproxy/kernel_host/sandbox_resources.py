"""Resources that all sandboxes of a kernel share, from its first process to its last.

They are its lifeline, its outputs and its connection files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kernelproxy.common import fork_hygiene, paths
from kernelproxy.zmq_proxy.connection import Connection


class SandboxResources:
    """Descriptors and files that the processes of one kernel get, one after the other.

    Parameters
    ----------
    info : mapping
        Connection information of the kernel manager, which clients use.
    name : str
        Name of the connection files.

    Attributes
    ----------
    outlets
        Standard output and error, as for `subprocess.Popen`.
    """

    def __init__(self, info: Mapping[str, Any], name: str) -> None:
        self._info, self._name = info, name
        self._directory = _private_directory()
        self._lifeline = os.pipe()  # its end of file reports our death to the sandboxes
        self.outlets: list[int | None] = [None, None]
        fork_hygiene.register(self)

    @property
    def lifeline(self) -> int:
        """Descriptor on which a sandbox waits for our end."""
        return self._lifeline[0]

    def keep(self, outlets: Sequence[IO[bytes] | int | None]) -> None:
        """Keep the outputs of the first process for its successors."""
        self.outlets = [_kept(outlet) for outlet in outlets]

    def write(self, name: str, where: Connection) -> str:
        """Write a connection file for a process; return its path."""
        directory = self._directory / name
        directory.mkdir(mode=0o700, exist_ok=True)
        where.write(directory / self._name, self._info)
        return str(directory / self._name)

    def free(self) -> None:
        """Close the descriptors and remove the files. Idempotent."""
        fds = [*self._lifeline, *self.outlets]
        self._lifeline, self.outlets = (-1, -1), [None, None]
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)
        shutil.rmtree(self._directory, ignore_errors=True)

    def disown(self) -> None:
        """Called in a forked child: close its copy of the lifeline, which would keep sandboxes
        alive after the parent's end.
        """
        fork_hygiene.redirect_to_null(self._lifeline)


def _kept(outlet: IO[bytes] | int | None) -> int | None:
    """Keep an output of a process for its successor."""
    if outlet is None:
        return None
    if not isinstance(outlet, int):
        return os.dup(outlet.fileno())
    if outlet == subprocess.PIPE:
        return subprocess.DEVNULL  # its reader reads only the first process
    return os.dup(outlet) if outlet >= 0 else outlet


def _private_directory() -> Path:
    """Make a directory for connection files, and remove those of servers that have died."""
    parent = paths.runtime_dir() / "kernels"
    parent.mkdir(mode=0o700, exist_ok=True)
    for left in parent.iterdir():
        owner = left.name.partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
