"""Saving the process of a session's kernel: it detaches, is dumped, and reattaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernelproxy.agent.process.process_manager import GONE, ProcessManagerConnection
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import Dump, Dumped

LEAVE_SECONDS = 30.0
#: The process manager has limits of its own, which depend on the size of the process.
DUMP_SECONDS = 3600.0


async def dump(
    manager: ProcessManagerConnection | None,
    kernel: KernelConnection,
    directory: Path,
    *,
    leave_running: bool,
    check: Callable[[], object],
) -> float:
    """Save the process of a kernel; afterwards the process continues or is gone.

    Parameters
    ----------
    manager : ProcessManagerConnection or None
        None: it is not connected.
    kernel : KernelConnection
        It is between two of its requests; the caller holds the session's lock.
    directory : Path
        Empty.
    leave_running : bool
    check : callable
        Called when the kernel has detached: nothing of the session changes then. If it raises,
        the kernel continues and nothing is saved.

    Returns
    -------
    float
        Seconds for which the process was stopped.

    Raises
    ------
    ControlError
        If it could not be saved: then it continues. If the process manager was lost, the outcome is
        not known.
    """
    if manager is None:
        raise ControlError(f"its process cannot be saved while {GONE}", "unavailable")
    wake_fd = await kernel.detach(LEAVE_SECONDS)
    try:
        check()
    except BaseException:
        kernel.wake()
        raise
    order = Dump(str(directory), wake_fd, leave_running)
    return (await manager.order(order, Dumped, DUMP_SECONDS)).seconds
