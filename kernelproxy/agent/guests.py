"""What is believed of users, and how much of the system daemon one may take for himself."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from pathlib import Path

from kernelproxy.agent import report
from kernelproxy.agent.channel import Channel
from kernelproxy.agent.foreign import Guard
from kernelproxy.agent.owners import Owner
from kernelproxy.errors import ControlError
from kernelproxy.protocol import OpenSession

SESSIONS_MAX = 64
USER_LENGTH_MAX = 200
CONNECTIONS_MAX = 256
_TEXT_CHARACTERS_MAX = 1000
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
#: Lines of the log, for each second and at once: users cause them.
_LINES_PER_SECOND, _LINES_AT_ONCE = 20.0, 1000.0


class Guests:
    """Counts the open connections of each user but root."""

    def __init__(self) -> None:
        self._open: Counter[int] = Counter()
        self._nobody = int(_OVERFLOW.read_text())

    def admit(self, sock: socket.socket) -> Channel | None:
        """Take a connection, or close it if its user may not have another one."""
        uid = Owner.at(sock).uid
        guard = Guard(uid)
        crowded = uid != 0 and (self._open[uid] >= CONNECTIONS_MAX or guard.full)
        # Whom this namespace has no number for has that of all others like him.
        if crowded or uid == self._nobody:
            sock.close()
            return None
        self._open[uid] += 1
        channel = Channel(sock, guard)
        channel.on_close = lambda: self._left(uid)
        return channel

    def _left(self, uid: int) -> None:
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]


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
            record.msg = f"({self._missing} lines are left out) {record.msg}"
            self._missing = 0
        return True


def tame(text: str) -> str:
    """What a user wrote, as far as it may stand in a line of the log."""
    cut = text[:_TEXT_CHARACTERS_MAX]
    return "".join(each if each.isprintable() else "?" for each in cut)


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
        return report.user_name(uid)
    if len(claim) > USER_LENGTH_MAX or not claim.isprintable():
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
    for text in (request.name, request.kernel_id, request.notebook, request.key):
        if text != tame(text):
            raise ControlError(f"{text[:100]!r} is no name.", "bad-request")
