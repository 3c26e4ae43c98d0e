"""Observer of all sessions: passes what changes to subscribers and to the activity record."""

from __future__ import annotations

from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.status.activity_recorder import ActivityRecorder
from kernelproxy.agent.status.session_status import describe_session
from kernelproxy.agent.status.subscribers import Subscribers
from kernelproxy.common.protocol.views import SessionView


class StatusObserver:
    """Notifies subscribers and the recorder; its methods are those of `SessionObserver`.

    Parameters
    ----------
    audience : Subscribers
    chronicle : ActivityRecorder
    """

    def __init__(self, audience: Subscribers, chronicle: ActivityRecorder) -> None:
        self._audience, self._chronicle = audience, chronicle

    def changed(self, session: Session) -> None:
        """See `SessionObserver`."""
        self._audience.note(session)

    def state_changed(self, session: Session) -> None:
        """See `SessionObserver`."""
        self._chronicle.became(session)

    def happened(self, session: Session, kind: str, text: str) -> None:
        """See `SessionObserver`."""
        self._chronicle.happened(session, kind, text)

    def executed(self, session: Session) -> None:
        """See `SessionObserver`."""
        self._chronicle.note_executed(session)

    def describe(self, session: Session) -> SessionView:
        """See `SessionObserver`."""
        return describe_session(session)
