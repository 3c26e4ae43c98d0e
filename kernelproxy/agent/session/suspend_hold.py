"""The conditions that resume a session which a user suspended.

Note [Holding]: a session that was suspended for idleness resumes at the next append. One that a
user suspended is *held*: appends by the running cell, a background thread or the garbage collector
do not resume it; the first append of the next cell does, and so does `resume`. If it was suspended
from inside its own cell, that cell resumes it too, but only when it waits for the device: it must
not wait for itself. If it was suspended in the middle of a cell, the next cell cannot begin before
that one has ended; so any cell that its user runs resumes it: the kernel reports that it was asked
for another cell. A checkpoint or a restore that is requested from outside resumes it, too: while
the kernel waits for the device in one, it runs no cell. A client that reports no cells is resumed
by its next append.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.agent.state.device_state import DeviceState


@dataclass(frozen=True)
class SuspendHold:
    """A suspension that an append alone does not end; see Note [Holding].

    Parameters
    ----------
    by_itself : bool
        True if the session's own kernel asked for it.
    cell_stamp : int
        When a cell had last begun or ended at that moment (`ClientPage.cell_changed_ns`).
    head : int
        End of the log at that moment.
    in_cell : bool
        True if a cell was running at that moment.
    by : str
        Name of the user that suspended it, as the system knows it; "": no user did.
    at : float
        When, in seconds of the epoch.
    """

    by_itself: bool
    cell_stamp: int
    head: int
    in_cell: bool = False
    by: str = ""
    at: float = 0.0

    def is_over(self, state: DeviceState) -> bool:
        """Return True if the client's current activity ends the hold."""
        client = state.memory.client
        if self.cell_stamp:
            over = client.cells_running > 0 and client.cell_changed_ns != self.cell_stamp
        else:
            over = client.head > self.head or state.wants_memory
        return over or (self.by_itself and (state.awaited or state.wants_memory))
