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
    holds : bool
        True if it has a lease.
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
    holds: bool = False
    resident: bool = False
    shortfall: str = ""
    sent: bool = False

    def view(self) -> SessionUse:
        """Return the session as `differences` of policies need it."""
        memory = self.memory if self.resident else 0
        return SessionUse(self.terms.user, self.holds, int(self.holds), memory)
