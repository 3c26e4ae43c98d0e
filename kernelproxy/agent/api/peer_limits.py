"""What is believed of users, and how much of the system daemon one may take for himself."""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kernelproxy.agent.status import session_status
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.ipc.fair_share import Share
from kernelproxy.common.ipc.fd_validation import Guard, few_are_left, is_scarce
from kernelproxy.common.ipc.peer import peer_of
from kernelproxy.common.protocol import OpenSession
from kernelproxy.common.readable import escaped, has_control

SESSIONS_MAX = 64
USER_LENGTH_MAX = 200
CONNECTIONS_MAX = 256
#: Connections that one user may make at once, and from then on in a second.
CONNECTS_AT_ONCE, CONNECTS_PER_SECOND = 500, 50.0
#: So many users can have all the connections that each may have.
_USERS_AT_LEAST = 16
_SAY_SECONDS = 10.0
_TEXT_CHARACTERS_MAX = 1000
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
#: Lines of the log, for each second and at once: users cause them.
_LINES_PER_SECOND, _LINES_AT_ONCE = 20.0, 1000.0

log = logging.getLogger(__name__)


class Guests:
    """Admits connections, of each user but root so many at a time and in a second.

    Parameters
    ----------
    descriptors : int, optional
        How many this process may have; by default what the system says.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self, descriptors: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        limit = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._users: dict[int, _User] = {}
        self._clock, self._nobody = clock, int(_OVERFLOW.read_text())
        self._most = max(8, min(CONNECTIONS_MAX, limit // _USERS_AT_LEAST))

    def admit(self, sock: socket.socket) -> Channel | None:
        """Take a connection, or close it if its user may not have another one."""
        uid = peer_of(sock)
        now = self._clock()
        user = self._users.get(uid) or self._add(uid, now)
        why = user.obstacle(self._most, now)
        if not why and is_scarce(sock.fileno()):
            why = "the daemon has few descriptors left"
        # Whom this namespace has no number for has that of all others like him.
        if uid == self._nobody:
            why = "this namespace has no number for them"
        if why and uid != 0:
            sock.close()
            self._refused(uid, user, why, now)
            return None
        user.open += 1
        channel = Channel(sock, Guard(uid, share=user.share if uid else None))
        channel.on_close = lambda: self._left(uid)
        return channel

    def _add(self, uid: int, now: float) -> _User:
        # Whoever has no connection and has made none for a while is forgotten.
        for other in [u for u, each in self._users.items() if each.is_idle(now)]:
            del self._users[other]
        user = self._users[uid] = _User(uid, now)
        return user

    def _left(self, uid: int) -> None:
        self._users[uid].open -= 1

    def _refused(self, uid: int, user: _User, why: str, now: float) -> None:
        """Say so in the log, now and then."""
        user.refused += 1
        if now - user.said < _SAY_SECONDS:
            return
        log.warning("User %d: %d connections were closed at once: %s", uid, user.refused, why)
        user.said, user.refused = now, 0


class _User:
    """One user's connections."""

    def __init__(self, uid: int, now: float) -> None:
        self.open = self.refused = 0
        self.said = -math.inf
        self.share, self._guard = Share(), Guard(uid)
        self._tokens, self._at = float(CONNECTS_AT_ONCE), now

    def obstacle(self, most: int, now: float) -> str:
        """Why he may not have another one; "": he may."""
        self._refill(now)
        if self.open >= most:
            return f"{most} are open"
        if self._tokens < 1:
            return f"they make more than {CONNECTS_PER_SECOND:g} a second"
        if self._guard.full:
            return "they have sent files that cannot be closed"
        self._tokens -= 1
        return ""

    def is_idle(self, now: float) -> bool:
        """Whether nothing is to be known of him."""
        self._refill(now)
        return not self.open and self._tokens >= CONNECTS_AT_ONCE and not self.share.pause()

    def _refill(self, now: float) -> None:
        more = (now - self._at) * CONNECTS_PER_SECOND
        self._tokens, self._at = min(CONNECTS_AT_ONCE, self._tokens + more), now


class Modesty(logging.Filter):
    """Lets so many lines into the log, and no more: they lie on a disk of root's."""

    def __init__(self) -> None:
        super().__init__()
        self._left, self._at, self._missing = _LINES_AT_ONCE, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line may be written; the next one that may says how many were left out."""
        now = time.monotonic()
        self._left = min(_LINES_AT_ONCE, self._left + (now - self._at) * _LINES_PER_SECOND)
        self._at = now
        if self._left < 1:
            self._missing += 1
            return False
        self._left -= 1
        if self._missing:
            record.msg = f"({self._missing} lines were dropped) {record.msg}"
            self._missing = 0
        return True


def tame(text: str) -> str:
    """What a user wrote, as far as it may stand in a line of the log."""
    return escaped(text[:_TEXT_CHARACTERS_MAX])


def user_of(claim: str, uid: int) -> str:
    """Say who a session is for.

    Parameters
    ----------
    claim : str
        Whom a front end has named; "": nobody.
    uid : int
        User number of that front end: whoever is not this daemon's own user, nor root, speaks for
        themselves.

    Raises
    ------
    ControlError
        If that is no name.
    """
    if not claim or uid not in (os.getuid(), 0):
        return session_status.user_name(uid)
    if len(claim) > USER_LENGTH_MAX or has_control(claim):
        raise ControlError("A user's name is one line of at most 200 characters.", "bad-request")
    return claim


def check_request(request: OpenSession, sessions: int) -> None:
    """Check what a user asks for who has so many sessions.

    Raises
    ------
    ControlError
        If he may not have another one, or its names are none.
    """
    if sessions >= SESSIONS_MAX:
        raise ControlError(f"You have {sessions} sessions already: end one.", "too-many")
    if few_are_left():
        raise ControlError(
            "The daemon of this machine has too few file descriptors left for another session: try "
            "again later, or ask the administrator to raise its limit (LimitNOFILE).",
            "too-many",
        )
    for text in (request.name, request.kernel_id, request.notebook, request.key):
        if len(text) > _TEXT_CHARACTERS_MAX or has_control(text):
            raise ControlError(
                f"'{escaped(text[:100])}' is not a valid name: it has control characters, or more "
                f"than {_TEXT_CHARACTERS_MAX} characters.",
                "bad-request",
            )
