"""Denial of devices: if a session's user may use no device, its client gets an error instead of
waiting forever.

Its pending requests stay in its log, and its state is kept. As soon as its user is admitted, the
session continues where it stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import Hold
from kernelproxy.common.shared_memory import Presence

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session


class Denial:
    """Denies devices to one session, and ends the denial. Called under the session's lock.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Reason for the denial, as a sentence; empty if it is not denied.
        self.why = ""

    async def deny(self, why: str) -> None:
        """Make what its client runs raise `why`, and free its device memory."""
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
        """End the denial if its user may use devices now."""
        session = self._session
        if self.why and not session.arbiter.admits(session.user):
            self.why, session.hold = "", None
            session.device_state.announce(Presence.ABSENT)
            session.deposit()
