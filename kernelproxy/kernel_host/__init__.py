"""Who has the kernels of servers that keep them: a process that outlives the servers.

One per runtime directory, started at first need. Kernels are its children, and the tenders of those
whose process can be saved (`kernelproxy.criu`) are threads of it; a server drives each of its
kernels over a connection. When that ends, the server has left: the kernel goes on for a while, and
the same server, started again, adopts it. The attendant leaves when it has no kernel; if it dies,
so do its kernels, as they do with a server that keeps none.

=============  ==================================================================================
`host`         the process: who has a kernel, when it has ended, when to leave
`kernels`      one kernel in it, in a sandbox or not
`remote`       a kernel as its server sees it, over its connection
`records`      what a server leaves on disk for the one that takes its place
`keeping`      what provisioners know of it: whether, and where, their server keeps kernels
=============  ==================================================================================
"""

from __future__ import annotations

from pathlib import Path

from kernelproxy.common import paths

SOCKET_NAME = "attendant.sock"


def directory() -> Path:
    """Where its socket and its lock are; created if missing.

    Raises
    ------
    ControlError
        As `paths.runtime_dir`.
    """
    place = paths.runtime_dir() / "attendant"
    place.mkdir(mode=0o700, exist_ok=True)
    return place
