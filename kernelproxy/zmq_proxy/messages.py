"""Parts of Jupyter's messages that the ZMQ proxy reads: requests, and which are unanswered.

A message is a list of frames: routing, a delimiter, the signature, header, parent header, metadata,
content, and buffers. They are forwarded unchanged.
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
#: Messages without a reply. A kernel may handle them while it executes something else.
_COMM = frozenset({"comm_open", "comm_msg", "comm_close"})
#: Limit of the table of unanswered requests; no more were ever seen.
_REQUESTS_MAX = 10_000


@dataclass(frozen=True)
class Request:
    """Request of a client: id, type, and whether it is for another thread (a subshell)."""

    id: str
    type: str
    apart: bool


def body(frames: Frames) -> Frames:
    """Return the frames from the signature on; none if it is not a message."""
    for index, frame in enumerate(frames):
        if frame.buffer == DELIM:
            return frames[index + 1 :] if len(frames) - index > 5 else ()
    return ()


def decoded(frame: zmq.Frame) -> dict[str, Any]:
    """Parse a frame as a JSON object; return an empty one if it is not valid."""
    try:
        found = parse_json(frame.bytes)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Signer:
    """Parses requests signed with the key, and makes messages of its own."""

    def __init__(self, connection: Connection) -> None:
        self._session = Session(key=connection.key, signature_scheme=connection.scheme)
        self._own = self._session.session

    def request(self, frames: Frames) -> Request | None:
        """Parse a request; return None if its signature is wrong: kernels ignore it, too."""
        parts = body(frames)
        if not parts:
            return None
        if self._session.auth is not None:
            signature = self._session.sign([frame.buffer for frame in parts[1:5]])
            if not hmac.compare_digest(signature, parts[0].bytes):
                return None
        header = decoded(parts[1])
        if not isinstance(header.get("msg_id"), str):
            return None
        return Request(
            header["msg_id"], str(header.get("msg_type")), header.get("subshell_id") is not None
        )

    def make(
        self, kind: str, content: dict[str, Any] | None = None, to: Frames | None = None
    ) -> tuple[str, list[bytes]]:
        """Make a message, and return its id and its frames; `to`: a request that it answers."""
        parent, route = None, []
        if to is not None:
            parts = body(to)
            parent = decoded(parts[1])
            route = [frame.bytes for frame in to[: len(to) - len(parts) - 1]]
        header = self._session.msg_header(kind)
        message = self._session.msg(kind, content or {}, parent, header)
        return header["msg_id"], self._session.serialize(message, route)

    def is_own(self, message_id: str) -> bool:
        """True if a message was made here."""
        return message_id.startswith(self._own)


def parent_of(frames: Frames) -> str:
    """Return the id of the request that a message answers; empty if it answers none."""
    parts = body(frames)
    found = decoded(parts[2]).get("msg_id") if parts else None
    return found if isinstance(found, str) else ""


def state_of(frames: Frames) -> tuple[str, str]:
    """Return a kernel's status and the id of its request; both empty for other messages."""
    parts = body(frames)
    if not parts or b'"status"' not in parts[1].bytes:  # parse only what may be a status
        return "", ""
    if decoded(parts[1]).get("msg_type") != "status":
        return "", ""
    return str(decoded(parts[4]).get("execution_state")), parent_of(frames)


def is_welcome(frames: Frames) -> bool:
    """True if a kernel welcomes a subscriber: the proxy, which itself welcomes clients."""
    parts = body(frames)
    return bool(parts) and b'"iopub_welcome"' in parts[1].bytes


@dataclass
class PendingRequest:
    """Request that the kernel has not completed, as far as is known."""

    channel: str
    frames: Frames
    request: Request
    started: bool = False
    replied: bool = False
    idle: bool = False

    @property
    def done(self) -> bool:
        """True if it is answered, with all of its output."""
        return self.idle and (self.replied or self.request.type in _COMM)


@dataclass
class Unanswered:
    """Requests that the kernel has not completed, in the order of their arrival.

    Each channel is processed in order, except requests for other threads. So when a request is
    completed, those before it are, too, even without any reply: some messages have none.
    """

    _entries: dict[str, PendingRequest] = field(default_factory=dict)

    def add(self, entry: PendingRequest) -> None:
        """Add a request that is sent to the kernel."""
        if len(self._entries) >= _REQUESTS_MAX:
            del self._entries[next(iter(self._entries))]
        self._entries[entry.request.id] = entry

    def replied(self, request_id: str) -> None:
        """Record that a reply was forwarded."""
        if entry := self._entries.get(request_id):
            entry.replied = True
            self._settle(entry)

    def status(self, request_id: str, state: str) -> None:
        """Record the kernel's status for a request."""
        if entry := self._entries.get(request_id):
            entry.started = True
            entry.idle = state == "idle"
            self._settle(entry)

    def executing(self) -> PendingRequest | None:
        """Return the request that the kernel's main thread executes, if there is one."""
        mine = (e for e in self._entries.values() if e.channel == "shell" and not e.request.apart)
        return next((entry for entry in mine if entry.started), None)

    def holds(self, entry: PendingRequest) -> bool:
        """True if a request is still in the table."""
        return self._entries.get(entry.request.id) is entry

    def any(self, channel: str) -> bool:
        """True if there may be an unanswered request on a channel."""
        return any(entry.channel == channel for entry in self._entries.values())

    def take(self) -> list[PendingRequest]:
        """Return all requests in order, and clear the table."""
        entries, self._entries = list(self._entries.values()), {}
        return entries

    def settled(self) -> None:
        """Record that the kernel has completed all requests, except those for other threads."""
        for entry in list(self._entries.values()):
            if not entry.request.apart:
                del self._entries[entry.request.id]

    def _settle(self, entry: PendingRequest) -> None:
        """Remove a completed request, and those that must have been completed before it."""
        if not entry.done:
            return
        if not entry.request.apart:
            for other in list(self._entries.values()):
                if other is entry:
                    break
                if other.channel == entry.channel and not other.request.apart:
                    del self._entries[other.request.id]
        del self._entries[entry.request.id]
