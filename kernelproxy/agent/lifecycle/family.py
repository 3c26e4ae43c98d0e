"""Sessions of processes that another session's process has started: its children."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.session.core import Inhibitor
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import OpenSession
from kernelproxy.criu.process_tree import is_within

PARENT_ENDED = "The session of the process that started it has ended."


class Families:
    """Finds the parents and children of sessions, and ends children with their parent.

    Parameters
    ----------
    sessions : mapping of str to Session
        All open sessions, by id.
    """

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions

    def parent(self, request: OpenSession, uid: int, pid: int) -> Session | None:
        """Return the parent of a session that a user's process wants to open; None if it has none.

        Raises
        ------
        ControlError
            If the parent has ended, or belongs to another user.
        """
        if not request.parent:
            return None
        parent = self._copy(request.parent, uid, pid) or self._sessions.get(request.parent)
        if parent is None or parent.core.closing:
            raise ControlError(
                "The session of the process that started this one has ended, so this one gets "
                "none: start it again.",
                "ended",
            )
        if parent.core.owner != uid:
            raise ControlError(
                f"Session {request.parent} belongs to {parent.core.user}: only their own "
                "processes can have sessions below it.",
                "not-allowed",
            )
        return parent

    def _copy(self, name: str, uid: int, pid: int) -> Session | None:
        """Return the session that continues one in a copy, if that has started the process.

        A restored process that has not used the device yet names the session of the original.
        """
        for each in self._sessions.values():
            there = each.kernel
            continues = name in there.continues and each.core.owner == uid
            if continues and is_within(pid, there.pid or 0):
                return each
        return None

    @staticmethod
    def inherited(request: OpenSession, parent: Session, *, named: bool = False) -> OpenSession:
        """Return a child's request with what it has from its parent; if it is `named`, its name."""
        of_parent = parent.core.request
        below = not named and (not request.name or request.name.startswith(" "))
        return replace(
            request,
            parent=parent.id,
            name=f"{parent.core.name}{request.name}" if below else request.name,
            user=parent.core.user,
            notebook=of_parent.notebook,
            device=request.device or of_parent.device,
            idle_timeout=(
                of_parent.idle_timeout if request.idle_timeout is None else request.idle_timeout
            ),
        )

    def added(self, session: Session) -> None:
        """Note a session that was opened or recovered."""
        session.core.inhibitors[Inhibitor.CHILDREN] = lambda: bool(self.children(session.id))
        session.saver.find_children = lambda: [each.child for each in self.below(session.id)]

    def children(self, name: str) -> list[Session]:
        """Return the children of a session that are not closing."""
        return [
            each
            for each in self._sessions.values()
            if each.core.request.parent == name and not each.core.closing
        ]

    def below(self, name: str) -> list[Session]:
        """Return the children of a session and their own children, parents first."""
        found = self.children(name)
        for each in found:  # grows meanwhile
            found += self.children(each.id)
        return found

    def closed(self, session: Session) -> None:
        """End the children of a session that has closed, and reconcile its parent."""
        self._end_children(session.id)
        if (parent := self._sessions.get(session.core.request.parent)) is not None:
            parent.core.request_reconcile()  # it may hibernate now

    def _end_children(self, name: str) -> None:
        for each in self.children(name):
            each.close(PARENT_ENDED)

    def end_orphans(self) -> None:
        """End the recovered sessions whose parents were not recovered."""
        parents = {each.core.request.parent for each in self._sessions.values()} - {""}
        for name in parents - self._sessions.keys():
            self._end_children(name)
