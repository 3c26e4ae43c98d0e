"""The socket file of a daemon: made again when it is gone, and removed only by its owner.

Note [Door]: the holder of a place's lock file owns the socket file there. Cleaners of temporary
files remove files that they do not know, so the daemon checks each second that its socket file is
there. It binds another one only while the lock file in the place is still the one that it has
locked. If the lock file was removed, too, another daemon may run there now.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.system_mode import Place

LOCK_NAME = "agent.lock"
#: Interval in seconds at which the daemon checks for its file.
POLL_SECONDS = 1.0


class SocketFile:
    """The listening socket of a place, and its file.

    Parameters
    ----------
    place : Place
    lock : int
        Descriptor of the lock on `place`, which is held.
    listener : socket.socket, optional
        The socket of an agent that died; by default a new one is bound.
    """

    def __init__(self, place: Place, lock: int, listener: socket.socket | None = None) -> None:
        self._place, self._lock = place, lock
        self.listener = self._bind() if listener is None else listener
        self._file = _identity(place.socket)

    def _bind(self) -> socket.socket:
        """Bind a socket; its file appears only once it has its group and its mode."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self._place.socket
        new = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            new.unlink(missing_ok=True)
            with paths.short_path(new) as name:
                listener.bind(name)
            os.chown(new, -1, self._place.group)
            new.chmod(self._place.mode)
            new.replace(path)
        except BaseException:
            listener.close()
            new.unlink(missing_ok=True)
            raise
        return listener

    def repaired(self) -> socket.socket | None:
        """Bind another socket if the file is gone; see Note [Door].

        Returns
        -------
        socket.socket or None
            The previous socket, of which the caller takes ownership; None: nothing was done.

        Raises
        ------
        OSError
            If it cannot be bound now.
        """
        if self._is_there() or not self._has_place():
            return None
        before, self.listener = self.listener, self._bind()
        self._file = _identity(self._place.socket)
        return before

    def close(self) -> None:
        """Remove the file, if it is still this socket's, and stop listening."""
        if self._is_there():
            self._place.socket.unlink(missing_ok=True)
        self.listener.close()

    def _is_there(self) -> bool:
        return self._file is not None and _identity(self._place.socket) == self._file

    def _has_place(self) -> bool:
        held = os.fstat(self._lock)
        return _identity(self._place.private / LOCK_NAME) == (held.st_dev, held.st_ino)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode numbers of the file at a path; None if there is none."""
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_dev, about.st_ino
