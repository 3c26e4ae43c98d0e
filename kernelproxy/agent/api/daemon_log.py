"""The daemon's log file, to which its supervisor, its zygotes and their workers write, too."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

BYTES_MAX = 8 << 20
#: Interval in seconds at which its size is checked.
POLL_SECONDS = 10.0


def bound(path: Path, fd: int = 2, most: int = BYTES_MAX) -> bool:
    """Truncate the log if it is too large, and keep its last part in another file.

    All writers append to one file, so it is truncated in place instead of being replaced.

    Parameters
    ----------
    path : Path
        Path of the log. Its last part is kept in a file of this name with ``.old`` appended.
    fd : int
        The log, open for appending; one that is not a regular file is left as it is.
    most : int
        Largest size in bytes.

    Returns
    -------
    bool
        True if it was truncated.
    """
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size <= most:
        return False
    old = path.with_name(path.name + ".old")
    with contextlib.suppress(OSError):  # such as a full disk: then the old part is lost
        with open(f"/proc/self/fd/{fd}", "rb") as written:
            written.seek(-most, os.SEEK_END)
            last = written.read(most)
        with open(os.open(old, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as kept:
            kept.write(last)
    os.ftruncate(fd, 0)
    return True
