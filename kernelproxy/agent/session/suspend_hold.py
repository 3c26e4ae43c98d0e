"""What brings a session back that somebody suspended.

Note [Holding]: a session that was suspended for idleness comes back at the next append. One that
somebody suspended is *held*: what the running cell, a background thread or the garbage collector
appends does not bring it back; the next cell's first append does, and so does `resume`. If it was
suspended from inside its own cell, that cell brings it back too, but only when it waits for the
device: it must not wait for itself. In the middle of a cell, where the next one cannot begin before
that has ended, whatever its user runs brings it back: the kernel says that it was asked for another
cell. A checkpoint or a restoration that was asked for from outside
brings it back, too: while the kernel waits for the device in one, it runs no cell. A client that
reports no cells comes back at its next append.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.agent.state.device_state import DeviceState


@dataclass(frozen=True)
class Hold:
    """A suspension that an append alone does not end: see Note [Holding].

    Parameters
    ----------
    by_itself : bool
        Whether the session's own kernel asked for it.
    cell_stamp : int
        When a cell had last begun or ended then (`ClientPage.cell_changed_ns`).
    head : int
        End of the log then.
    in_cell : bool
        Whether a cell ran then.
    by : str
        Name of the user who asked for it, as the system knows it; "": nobody did.
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
        """Whether what its client does now ends it."""
        client = state.memory.client
        if self.cell_stamp:
            over = client.cells_running > 0 and client.cell_changed_ns != self.cell_stamp
        else:
            over = client.head > self.head or state.wants_memory
        return over or (self.by_itself and (state.awaited or state.wants_memory))
