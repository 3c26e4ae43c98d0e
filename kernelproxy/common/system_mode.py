"""Directories of a daemon: a user's own daemon, or the system daemon, which serves all users.

The system daemon runs as root. Its socket is in a directory that only root may write. Its other
files (locks, log, decisions, states, checkpoints) are where only root may read. Its users are
authenticated by peer credentials, and see of each other only what `report` shows.
"""

from __future__ import annotations

import grp
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kernelproxy.common import options, paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ownership import own_directory

DATA_DIR = "/var/lib/jupyter-sing"


@dataclass(frozen=True)
class Place:
    """Directories and socket of a daemon.

    Parameters
    ----------
    directory : Path
        Directory of its socket.
    private : Path
        Directory of its lock, its log and its other runtime files.
    mode, group : int
        Permissions and group of its socket; -1: the daemon's group.
    system : bool
        Whether it serves all users.
    """

    directory: Path
    private: Path
    mode: int = 0o600
    group: int = -1
    system: bool = False

    @property
    def socket(self) -> Path:
        """Path of its socket."""
        return self.directory / paths.SOCKET_NAME


def own_place() -> Place:
    """Return the place of this user's daemon; raises ControlError as `paths.runtime_dir`."""
    return Place(paths.runtime_dir(), paths.runtime_dir())


def system_place(group: str | None) -> Place:
    """Create the directories of the system daemon, and make this process use them.

    Parameters
    ----------
    group : str or None
        Group of users who may use it; None: all users.

    Raises
    ------
    ControlError
        If this process does not run as root, there is no such group, or others than root may write
        a directory.
    """
    if os.geteuid() != 0 or os.getuid() != 0:
        raise ControlError(
            "Only root can start the daemon of the whole system: sudo jupyter sing daemon "
            "--system.",
            "not-allowed",
        )
    try:
        gid = grp.getgrnam(group).gr_gid if group else -1
    except KeyError:
        raise ControlError(f"There is no group {group!r}.", "bad-request") from None
    data = Path(os.path.abspath(options.DATA_DIR.text() or DATA_DIR))
    try:
        directory = _directory(paths.system_dir(), 0o755)
        private = _directory(_directory(data, 0o700) / "daemon", 0o700)
    except OSError as error:
        raise ControlError(f"{error.filename} cannot be used: {error.strerror}.", "failed") from (
            error
        )
    os.umask(0o077)
    os.environ[options.DATA_DIR.variable] = str(data)
    os.environ[options.RUNTIME_DIR.variable] = str(private)
    paths.bundle_dir(directory, 0o755)  # where users' processes find our packages
    return Place(directory, private, 0o660 if group else 0o666, gid, system=True)


def _directory(path: Path, mode: int) -> Path:
    """Create a directory of root with these permissions, or check and set them on an existing one.

    Raises
    ------
    ControlError
        As `own_directory`.
    """
    own_directory(path, "remove it")
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)
    return path
