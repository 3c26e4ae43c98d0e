"""The log of the daemon, which its keeper, its zygotes and their workers write to as well."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

BYTES_MAX = 8 << 20
#: How often its size is looked at, in seconds.
LOOK_SECONDS = 10.0


def bound(path: Path, fd: int = 2, most: int = BYTES_MAX) -> bool:
    """Begin the log anew if it is too large, and keep what was written last beside it.

    All who write append to one file, so it is emptied where it is instead of being replaced.

    Parameters
    ----------
    path : Path
        Where what was written last is kept, with ``.old`` behind it.
    fd : int
        The log, open for appending; one that is no file is left as it is.
    most : int
        Bytes that it may have.

    Returns
    -------
    bool
        Whether it was begun anew.
    """
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size <= most:
        return False
    old = path.with_name(path.name + ".old")
    with contextlib.suppress(OSError):  # of a disk that is full: then the old part is lost
        with open(f"/proc/self/fd/{fd}", "rb") as written:
            written.seek(-most, os.SEEK_END)
            last = written.read(most)
        with open(os.open(old, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as kept:
            kept.write(last)
    os.ftruncate(fd, 0)
    return True
