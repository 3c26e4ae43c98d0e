"""The place of a daemon: its own user's, or the system's, which serves all users of the machine.

The system daemon is root's. Its socket lies in a directory that only root may write; whatever else
it keeps (locks, log, decisions, states, checkpoints) lies where only root may read. Its users
authenticate themselves by who they are, as the kernel says, and see of each other what `report`
shows.
"""

from __future__ import annotations

import grp
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ownership import own_directory

DATA_DIR = "/var/lib/jupyter-sing"


@dataclass(frozen=True)
class Place:
    """Where a daemon is.

    Parameters
    ----------
    directory : Path
        Of its socket.
    private : Path
        Of its lock, its log and what else it keeps while it runs.
    mode, group : int
        Of its socket; -1: the daemon's group.
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
        """Its socket."""
        return self.directory / paths.SOCKET_NAME


def own_place() -> Place:
    """The place of this user's daemon; raises ControlError as `paths.runtime_dir`."""
    return Place(paths.runtime_dir(), paths.runtime_dir())


def system_place(group: str | None) -> Place:
    """Make the place of the system daemon, and have this process find all it keeps there.

    Parameters
    ----------
    group : str or None
        Name of those who may use it; None: everybody.

    Raises
    ------
    ControlError
        If this process is not root's, there is no such group, or a directory is not root's alone.
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
    data = Path(os.path.abspath(os.environ.get("JUPYTER_SING_DATA_DIR") or DATA_DIR))
    try:
        directory = _directory(paths.system_dir(), 0o755)
        private = _directory(_directory(data, 0o700) / "daemon", 0o700)
    except OSError as error:
        raise ControlError(f"{error.filename} cannot be used: {error.strerror}.", "failed") from (
            error
        )
    os.umask(0o077)
    os.environ["JUPYTER_SING_DATA_DIR"] = str(data)
    os.environ["JUPYTER_SING_RUNTIME_DIR"] = str(private)
    paths.bundle_dir(directory, 0o755)  # where processes of users find us
    return Place(directory, private, 0o660 if group else 0o666, gid, system=True)


def _directory(path: Path, mode: int) -> Path:
    """Make a directory of root's with these rights, or check that one is.

    Raises
    ------
    ControlError
        As `own_directory`.
    """
    own_directory(path, "remove it")
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)
    return path
