"""Limits for each user of the system daemon, and checks of what users send."""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kernelproxy.agent.session import reasons
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
#: Connections that one user may make at once, and after that per second.
CONNECTS_AT_ONCE, CONNECTS_PER_SECOND = 500, 50.0
#: So many users can have the maximum of connections at the same time.
_USERS_AT_LEAST = 16
_LOG_PAUSE_SECONDS = 10.0
_TEXT_CHARACTERS_MAX = 1000
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
#: Lines that users may cause in the log, per second and at once.
_LINES_PER_SECOND, _LINES_AT_ONCE = 20.0, 1000.0

log = logging.getLogger(__name__)


class PeerLimits:
    """Admits connections; limits how many each user except root has, and makes per second.

    Parameters
    ----------
    descriptors : int, optional
        Descriptors that this process may have; by default the limit of the system.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self, descriptors: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        limit = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._users: dict[int, _User] = {}
        self._clock, self._overflow_uid = clock, int(_OVERFLOW.read_text())
        self._most = max(8, min(CONNECTIONS_MAX, limit // _USERS_AT_LEAST))

    def admit(self, sock: socket.socket) -> Channel | None:
        """Take ownership of a connection; close it if its user may not have another one."""
        uid = peer_of(sock)
        now = self._clock()
        user = self._users.get(uid) or self._add(uid, now)
        why = user.obstacle(self._most, now)
        if not why and is_scarce(sock.fileno()):
            why = "the daemon has few descriptors left"
        # UIDs not mapped into this user namespace all appear as the overflow UID.
        if uid == self._overflow_uid:
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
        # Forget users that have no connection and have made none for a while.
        for other in [u for u, each in self._users.items() if each.is_idle(now)]:
            del self._users[other]
        user = self._users[uid] = _User(uid, now)
        return user

    def _left(self, uid: int) -> None:
        self._users[uid].open -= 1

    def _refused(self, uid: int, user: _User, why: str, now: float) -> None:
        """Count a refused connection; log the count at most once in `_LOG_PAUSE_SECONDS`."""
        user.refused += 1
        if now - user.logged_at < _LOG_PAUSE_SECONDS:
            return
        log.warning("User %d: %d connections were closed at once: %s", uid, user.refused, why)
        user.logged_at, user.refused = now, 0


class _User:
    """One user's connections."""

    def __init__(self, uid: int, now: float) -> None:
        self.open = self.refused = 0
        self.logged_at = -math.inf
        self.share, self._guard = Share(), Guard(uid)
        self._tokens, self._at = float(CONNECTS_AT_ONCE), now

    def obstacle(self, most: int, now: float) -> str:
        """Return why the user may not have another connection; "": they may."""
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
        """Return True if there is nothing to remember about the user."""
        self._refill(now)
        return not self.open and self._tokens >= CONNECTS_AT_ONCE and not self.share.pause()

    def _refill(self, now: float) -> None:
        more = (now - self._at) * CONNECTS_PER_SECOND
        self._tokens, self._at = min(CONNECTS_AT_ONCE, self._tokens + more), now


class LogFilter(logging.Filter):
    """Limits the rate of log lines: users cause them, and the log is on root's disk."""

    def __init__(self) -> None:
        super().__init__()
        self._left, self._at, self._missing = _LINES_AT_ONCE, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if a line may be written; it then also says how many were dropped before."""
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
    """Return a user's text, cut and escaped so that it can be part of a log line."""
    return escaped(text[:_TEXT_CHARACTERS_MAX])


def user_of(claim: str, uid: int) -> str:
    """Return the name of the user that a session is for.

    Parameters
    ----------
    claim : str
        Name that a front end gives; "": none.
    uid : int
        User id of that front end. Only this daemon's own user and root may name another user.

    Raises
    ------
    ControlError
        If `claim` is not a valid name.
    """
    if not claim or uid not in (os.getuid(), 0):
        return reasons.user_name(uid)
    if len(claim) > USER_LENGTH_MAX or has_control(claim):
        raise ControlError("A user's name is one line of at most 200 characters.", "bad-request")
    return claim


def check_count(sessions: int, more: int = 1) -> None:
    """Raise ControlError if a user with so many sessions may not have so many more."""
    if sessions + more > SESSIONS_MAX:
        raise ControlError(
            f"You have {sessions} sessions already, and may have {SESSIONS_MAX}: end one, or use "
            "fewer ranks.",
            "too-many",
        )


def check_request(request: OpenSession, sessions: int) -> None:
    """Check a user's request for a session; `sessions`: the number that they have already.

    Raises
    ------
    ControlError
        If they may not have another one, or a name in the request is not valid.
    """
    check_count(sessions)
    if few_are_left():
        raise ControlError(
            "The daemon of this machine has too few file descriptors left for another session: try "
            "again later, or ask the administrator to raise its limit (LimitNOFILE).",
            "too-many",
        )
    for text in (request.name, request.kernel_id, request.notebook, request.key, request.parent):
        if len(text) > _TEXT_CHARACTERS_MAX or has_control(text):
            raise ControlError(
                f"'{escaped(text[:100])}' is not a valid name: it has control characters, or more "
                f"than {_TEXT_CHARACTERS_MAX} characters.",
                "bad-request",
            )


def check_master(uid: int, *, system: bool) -> None:
    """Raise ControlError unless a user may make decisions that affect all users."""
    if uid not in (os.getuid(), 0):
        whose = "root" if system else "another user"
        raise ControlError(f"This daemon belongs to {whose}.", "not-allowed")
