"""A session, as the controller knows it."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.controller.effective_policy import Standing
from jupyter_sing.scheduler.policy import SessionView
from kernelproxy.common.scheduler_api import Terms


@dataclass(slots=True)
class Known:
    """What the agent says of a session, what holds for it, and what it has.

    Parameters
    ----------
    terms : Terms
    standing : Standing
    memory : int
        Bytes that it had in use when that was last said.
    holds : bool
        Whether it has a lease.
    resident : bool
        Whether its memory is on its device.
    shortfall : str
        Why what its tier promises does not hold for it, as a clause; empty if it does.
    said : bool
        Whether the agent knows all that.
    """

    terms: Terms
    standing: Standing
    memory: int
    holds: bool = False
    resident: bool = False
    shortfall: str = ""
    said: bool = False

    def view(self) -> SessionView:
        """How differences of policies look at it."""
        memory = self.memory if self.resident else 0
        return SessionView(self.terms.user, self.holds, int(self.holds), memory)
