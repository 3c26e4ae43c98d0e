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
    subscribers : Subscribers
    recorder : ActivityRecorder
    """

    def __init__(self, subscribers: Subscribers, recorder: ActivityRecorder) -> None:
        self._subscribers, self._recorder = subscribers, recorder

    def changed(self, session: Session) -> None:
        """See `SessionObserver`."""
        self._subscribers.note(session)

    def state_changed(self, session: Session) -> None:
        """See `SessionObserver`."""
        self._recorder.state_changed(session)

    def happened(self, session: Session, kind: str, text: str) -> None:
        """See `SessionObserver`."""
        self._recorder.happened(session, kind, text)

    def executed(self, session: Session) -> None:
        """See `SessionObserver`."""
        self._recorder.note_executed(session)

    def describe(self, session: Session) -> SessionView:
        """See `SessionObserver`."""
        return describe_session(session)
