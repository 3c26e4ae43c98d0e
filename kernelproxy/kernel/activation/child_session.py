"""The session of a process that a notebook or a program has started.

It is opened at the first use of the device, by this process itself: so it ends with this process,
also if the process is killed before it has attached.
"""

from __future__ import annotations

import os
import sys

from kernelproxy.common import options, paths
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import OpenSession, OpenSessionReply

#: Set for the ranks of ``jupyter sing run --nproc-per-node``: the process that starts them, the
#: name of their sessions, and the device that was requested.
LAUNCHER_VARIABLE, NAME_VARIABLE, DEVICE_VARIABLE = "SING_LAUNCHER", "SING_NAME", "SING_DEVICE"
#: The daemon answers at once, but may have to be replaced first.
_ANSWER_SECONDS_MAX = 120.0


def open_session(parent: str) -> str:
    """Open a session for this process.

    Parameters
    ----------
    parent : str
        Id of the session of the process that started this one; "": it has none.

    Returns
    -------
    str
        Its id.

    Raises
    ------
    ControlError
        If the daemon is gone or refuses: the parent has ended, the user has too many sessions or
        may not use devices.
    """
    request = OpenSession(
        name=_name(),
        kernel_id="",
        python=sys.executable,
        device=os.environ.get(DEVICE_VARIABLE) or None,
        script=True,
        user=options.user(),
        parent=parent,
    )
    with connect(start=False, path=paths.socket_path()) as control:
        return control.expect(OpenSessionReply, request, _ANSWER_SECONDS_MAX).session


def _name() -> str:
    """Return the program's name and the rank; without the former, it is the parent's."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    return f"{_program()} rank {rank}" if rank else _program()


def _program() -> str:
    """Return the name of the program that this process runs; "": code of its parent's."""
    given = os.environ.get(NAME_VARIABLE, "")
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if given and (file is None or is_rank()):
        return given
    return os.path.basename(file) if file else ""


def is_rank() -> bool:
    """Return True if this process was started by ``jupyter sing run --nproc-per-node``."""
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())
