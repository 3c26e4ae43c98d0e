"""A session whose user may use no device: its client is told, instead of waiting for what does not
come.

What it has asked for stays in its log, and its state is kept. As soon as its user is admitted, it
goes on where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import Hold
from kernelproxy.common.shared_memory import Presence

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session


class Denial:
    """Whether one session is denied devices. Called under the session's lock.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Why it was denied devices, as a sentence; empty if it was not.
        self.why = ""

    async def deny(self, why: str) -> None:
        """Let whatever its client runs end with a sentence; its device memory is freed."""
        session = self._session
        client = session.device_state.memory.client
        self.why = why
        session.returning.needed = False
        session.hold = Hold(False, client.cell_changed_ns or 1, client.head)
        if session.device_state.worker is not None:
            await session.suspend_if_idle(why.rstrip("."))
        if session.device_state.worker is None:
            session.become(State.SUSPENDED, why)
        session.device_state.announce(Presence.ENDED, why)
        session.deposit()

    def review(self) -> None:
        """Let it go on if its user may use devices by now."""
        session = self._session
        if self.why and not session.arbiter.admits(session.user):
            self.why, session.hold = "", None
            session.device_state.announce(Presence.ABSENT)
            session.deposit()
