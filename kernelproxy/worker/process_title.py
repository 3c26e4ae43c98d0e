"""Title of this process in `ps` and `top` (standard library only).

Linux reads a process's command line from the process's own memory, where it can be overwritten; any
other way needs root. So a process that will get a title is started with space for it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from kernelproxy.common.readable import escaped

#: Meaningless argument, whose memory a title may use.
ROOM = " " * 200
#: Positions in ``/proc/self/stat``, counted after the name of the program.
_ARG_START, _ARG_END = 45, 46


def show(title: str) -> None:
    """Show a title in place of this process's command line, truncated to the available space.

    Parameters
    ----------
    title : str
        Contains names that other users may have chosen.

    Raises
    ------
    OSError
        If there is no ``/proc``.
    """
    fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start - 1  # for the final zero; without it, the environment would be shown, too
    text = escaped(title).encode()[: max(0, room)].decode(errors="ignore").encode()
    if start and room > 0:
        ctypes.memmove(start, text.ljust(room + 1, b"\0"), room + 1)
