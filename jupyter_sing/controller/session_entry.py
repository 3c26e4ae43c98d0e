"""Session record of the controller."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.controller.effective_policy import EffectiveTerms
from jupyter_sing.scheduler.policy import SessionUse
from kernelproxy.common.scheduler_api import SessionDescription


@dataclass(slots=True)
class SessionEntry:
    """Description of a session by the agent, its effective terms, and what it holds.

    Parameters
    ----------
    terms : Terms
    standing : EffectiveTerms
    memory : int
        Bytes that it used at the last report.
    device : str
        Where it is, or was last.
    token : int, optional
        Of the lease that it has.
    granted : str
        Device of that lease.
    wants : bool
        True if it has something to execute.
    resident : bool
        True if its memory is on its device.
    shortfall : str
        Why the target of its tier cannot be kept, as a clause; empty if it is kept.
    sent : bool
        True if all of this was sent to the agent.
    """

    terms: SessionDescription
    standing: EffectiveTerms
    memory: int
    device: str = ""
    token: int | None = None
    granted: str = ""
    wants: bool = False
    resident: bool = False
    shortfall: str = ""
    sent: bool = False

    @property
    def holds(self) -> bool:
        """True if it has a lease."""
        return self.token is not None

    def view(self, devices: int) -> SessionUse:
        """Return the session as `differences` of policies need it; it has that many devices."""
        memory = self.memory if self.resident else 0
        return SessionUse(self.terms.user, self.holds, devices, memory)
