"""Kernel host: a process that owns kernels so that they survive the end of a Jupyter server.

One per runtime directory, started on demand. Kernels are its children. The process managers of
kernels whose process can be saved (`kernelproxy.criu`) are its threads. A server controls each of
its kernels over a connection. When that ends, the server has left: the kernel continues for a
while, and the same server, started again, adopts it. The kernel host exits when it has no kernel.
If it dies, its kernels die with it, as they do with a server that does not keep kernels.

===================  ============================================================================
`daemon`             the process: owners of kernels, their ends, and its own exit
`hosted_kernel`      one kernel in it, in a sandbox or not
`process_manager`    saves, restores and replaces the process of such a kernel
`agent_link`         its connection to the agent, which sends the commands
`sandbox_resources`  lifeline, outputs and connection files of its sandboxes
`process_handle`     the process as the kernel manager sees it: always one, even if it is replaced
`client`             a kernel as its server sees it, over its connection
`server_records`     what a server leaves on disk for its successor
`retention`          for provisioners: whether, and where, their server keeps kernels
===================  ============================================================================
"""

from __future__ import annotations

from pathlib import Path

from kernelproxy.common import paths

SOCKET_NAME = "attendant.sock"


def directory() -> Path:
    """Return the directory of its socket and its lock; created if missing.

    Raises
    ------
    ControlError
        As `paths.runtime_dir`.
    """
    place = paths.runtime_dir() / "attendant"
    place.mkdir(mode=0o700, exist_ok=True)
    return place
