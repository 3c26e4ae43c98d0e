"""What the switchboard understands of Jupyter's messages: who asks what, and what is answered.

A message is a list of frames: routing, a delimiter, the signature, header, parent header, metadata,
content, and buffers. They are passed on untouched.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from jupyter_client.session import DELIM, Session

from kernelproxy.common.untrusted import parse_json
from kernelproxy.zmq_proxy.connection import Connection

Frames = Sequence[zmq.Frame]
#: What has no reply. A kernel may deal with it while it executes something else.
_COMM = frozenset({"comm_open", "comm_msg", "comm_close"})
#: Requests of which a table remembers that they are unanswered; more were never seen.
_REQUESTS_MAX = 10_000


@dataclass(frozen=True)
class Request:
    """What a client asks: its id, its type, and whether it is for another thread (a subshell)."""

    id: str
    type: str
    apart: bool


def body(frames: Frames) -> Frames:
    """Return the frames from the signature on; none if it is no message."""
    for index, frame in enumerate(frames):
        if frame.buffer == DELIM:
            return frames[index + 1 :] if len(frames) - index > 5 else ()
    return ()


def said(frame: zmq.Frame) -> dict[str, Any]:
    """Read a frame of JSON; empty if it is something else."""
    try:
        found = parse_json(frame.bytes)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Signer:
    """Reads requests of those who have the key, and makes messages of its own."""

    def __init__(self, connection: Connection) -> None:
        self._session = Session(key=connection.key, signature_scheme=connection.scheme)
        self._own = self._session.session

    def request(self, frames: Frames) -> Request | None:
        """Understand a request; None if it is not signed by the key, which kernels ignore, too."""
        parts = body(frames)
        if not parts:
            return None
        if self._session.auth is not None:
            signature = self._session.sign([frame.buffer for frame in parts[1:5]])
            if not hmac.compare_digest(signature, parts[0].bytes):
                return None
        header = said(parts[1])
        if not isinstance(header.get("msg_id"), str):
            return None
        return Request(
            header["msg_id"], str(header.get("msg_type")), header.get("subshell_id") is not None
        )

    def make(
        self, kind: str, content: dict[str, Any] | None = None, to: Frames | None = None
    ) -> tuple[str, list[bytes]]:
        """Make a message, and return its id, too; `to`: a request which it answers."""
        parent, route = None, []
        if to is not None:
            parts = body(to)
            parent = said(parts[1])
            route = [frame.bytes for frame in to[: len(to) - len(parts) - 1]]
        header = self._session.msg_header(kind)
        message = self._session.msg(kind, content or {}, parent, header)
        return header["msg_id"], self._session.serialize(message, route)

    def is_own(self, message_id: str) -> bool:
        """Whether a message was made here."""
        return message_id.startswith(self._own)


def parent_of(frames: Frames) -> str:
    """Id of the request that a message answers; empty if it answers none."""
    parts = body(frames)
    found = said(parts[2]).get("msg_id") if parts else None
    return found if isinstance(found, str) else ""


def state_of(frames: Frames) -> tuple[str, str]:
    """Whether a kernel says that it is busy, and with which request; both empty if it does not."""
    parts = body(frames)
    if not parts or b'"status"' not in parts[1].bytes:  # most output is not worth reading
        return "", ""
    if said(parts[1]).get("msg_type") != "status":
        return "", ""
    return str(said(parts[4]).get("execution_state")), parent_of(frames)


def is_welcome(frames: Frames) -> bool:
    """Whether a kernel welcomes a subscriber: us, who welcome its clients."""
    parts = body(frames)
    return bool(parts) and b'"iopub_welcome"' in parts[1].bytes


@dataclass
class Entry:
    """A request that the kernel has not dealt with, as far as is known."""

    channel: str
    frames: Frames
    request: Request
    begun: bool = False
    replied: bool = False
    idle: bool = False

    @property
    def done(self) -> bool:
        """Whether it is answered, with all of its output."""
        return self.idle and (self.replied or self.request.type in _COMM)


@dataclass
class Unanswered:
    """The requests that a kernel has not dealt with, in the order in which they were asked.

    Each channel is dealt with in order, apart from what is for other threads. So when one is done,
    those before it are, even if nothing was heard of them: some messages have no answer.
    """

    _entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Note that the kernel is being asked."""
        if len(self._entries) >= _REQUESTS_MAX:
            del self._entries[next(iter(self._entries))]
        self._entries[entry.request.id] = entry

    def replied(self, request_id: str) -> None:
        """Note that a reply has passed."""
        if entry := self._entries.get(request_id):
            entry.replied = True
            self._settle(entry)

    def status(self, request_id: str, state: str) -> None:
        """Note that the kernel has said whether it is busy with a request."""
        if entry := self._entries.get(request_id):
            entry.begun = True
            entry.idle = state == "idle"
            self._settle(entry)

    def executing(self) -> Entry | None:
        """Return the request that the kernel's main thread is busy with, if there is one."""
        mine = (e for e in self._entries.values() if e.channel == "shell" and not e.request.apart)
        return next((entry for entry in mine if entry.begun), None)

    def holds(self, entry: Entry) -> bool:
        """Whether a request is still among these."""
        return self._entries.get(entry.request.id) is entry

    def any(self, channel: str) -> bool:
        """Whether there may be something unanswered on a channel."""
        return any(entry.channel == channel for entry in self._entries.values())

    def take(self) -> list[Entry]:
        """Return all of them in order, and forget them."""
        entries, self._entries = list(self._entries.values()), {}
        return entries

    def settled(self) -> None:
        """Note that the kernel has dealt with all that it was asked, apart from other threads."""
        for entry in list(self._entries.values()):
            if not entry.request.apart:
                del self._entries[entry.request.id]

    def _settle(self, entry: Entry) -> None:
        """Forget a request that is done, and those that must have been dealt with before it."""
        if not entry.done:
            return
        if not entry.request.apart:
            for other in list(self._entries.values()):
                if other is entry:
                    break
                if other.channel == entry.channel and not other.request.apart:
                    del self._entries[other.request.id]
        del self._entries[entry.request.id]
