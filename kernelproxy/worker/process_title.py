"""What `ps` and `top` show of this process (standard library only).

The kernel reads a process's command line from its own memory, where it may be overwritten: any
other way needs root. So a process that is going to have a title is started with room for it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from kernelproxy.common.readable import escaped

#: An argument without a meaning, whose memory a title may take.
ROOM = " " * 200
#: Positions in ``/proc/self/stat``, counted after the name of the program.
_ARG_START, _ARG_END = 45, 46


def show(title: str) -> None:
    """Show a title in place of this process's command line, as much of it as there is room for.

    Parameters
    ----------
    title : str
        Made of names that anybody may have chosen.

    Raises
    ------
    OSError
        There is no ``/proc``.
    """
    fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start - 1  # a zero ends it; without it, variables would be shown behind it
    text = escaped(title).encode()[: max(0, room)].decode(errors="ignore").encode()
    if start and room > 0:
        ctypes.memmove(start, text.ljust(room + 1, b"\0"), room + 1)
