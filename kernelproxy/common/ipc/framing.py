"""Messages as frames on stream sockets (standard library only).

A frame is a ``u32`` length (little-endian), then a JSON object ``{"kind": "OpenSession",
...fields}``. Descriptors travel by ``SCM_RIGHTS`` with the first bytes of their frame, whose object
then also counts them (``"fds": 4``), so that a reader of several frames at once knows which frame
they belong to. Decoding is strict: unknown kinds and fields, missing fields and wrong types raise
`ProtocolError`; nothing is ever unpickled.

Note [Bounds]: a sender may be malicious, and parsing blocks the receiver for all other peers. So a
frame is rejected before it is parsed if it is longer than its kind allows (the kind comes first; a
frame that begins otherwise may have `SMALL_BYTES_MAX`), or has more values than its reader allows:
the cost of parsing is proportional to these two. Parsed values are then checked once, here: numbers
must be finite and fit 64 bits, text must be Unicode, and nesting is limited.
"""

from __future__ import annotations

import array
import json
import math
import os
import re
import socket
import struct
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kernelproxy.common.errors import ProtocolError
from kernelproxy.common.protocol import LARGE_BYTES_MAX, SMALL_BYTES_MAX, Message

FRAME_BYTES_MAX = LARGE_BYTES_MAX
FDS_MAX = 16
DEPTH_MAX = 32
_INTEGERS = range(-(1 << 63), 1 << 64)
_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(\w{1,40})"')
_KIND_BYTES = 64
_LENGTH = struct.Struct("<I")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)

MessageType = type[Message]

_KINDS: dict[str, MessageType] = {each.wire_kind: each for each in Message.__subclasses__()}
_HINTS = {each: typing.get_type_hints(each) for each in _KINDS.values()}


@dataclass(frozen=True)
class Bounds:
    """Limits of what a reader accepts: see Note [Bounds].

    Parameters
    ----------
    frame_bytes : int
        Maximum length of a frame, even if its kind allows more.
    values : int
        Maximum number of values of a message, including those in lists and objects.
    fds : int
        Maximum number of descriptors that come before their message is complete.
    """

    frame_bytes: int = FRAME_BYTES_MAX
    values: int = 4_000_000
    fds: int = FDS_MAX


DEFAULT_BOUNDS = Bounds()


def encode(message: Message, fd_count: int = 0) -> bytes:
    """Encode a message as a frame.

    Raises
    ------
    ProtocolError
        If the frame would be longer than its kind may be, or carry too many descriptors.
    """
    body: dict[str, Any] = {"kind": message.wire_kind, **vars(message)}
    if fd_count:
        body["fds"] = fd_count
    text = json.dumps(body, separators=(",", ":")).encode()
    if len(text) > message.frame_bytes_max or fd_count > FDS_MAX:
        raise ProtocolError(
            f"A {body['kind']} message is too large to be sent: {len(text)} of "
            f"{message.frame_bytes_max} bytes."
        )
    return _LENGTH.pack(len(text)) + text


def decode(text: bytes, bounds: Bounds = DEFAULT_BOUNDS) -> tuple[Message, int]:
    """Decode the body of a frame into a message and the number of its descriptors.

    Raises
    ------
    ProtocolError
        If it is anything but a known message with exactly its fields.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > bounds.values:
        raise ProtocolError(f"A message has more than {bounds.values} values.")
    try:
        body = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
        # Escapes can encode lone surrogates, which are not characters. Python uses some of them
        # (surrogateescape) for file names that are not UTF-8; those are accepted.
        if b"\\u" in text:
            json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except UnicodeError as error:
        raise ProtocolError("A message has text that is not Unicode (UTF-8).") from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError("A message is not JSON.") from error
    if not isinstance(body, dict):
        raise ProtocolError("A message is not a JSON object.")
    _check_values(body)
    kind, fd_count = body.pop("kind", None), body.pop("fds", 0)
    message_type = _KINDS.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise ProtocolError(f"Unknown message {str(kind)[:40]!r}.")
    if type(fd_count) is not int or not 0 <= fd_count <= FDS_MAX:
        raise ProtocolError(f"A {kind} message has a bad number of descriptors.")
    hints = _HINTS[message_type]
    for name, value in body.items():
        if name not in hints:
            raise ProtocolError(f"A {kind} message has an unknown field {name[:40]!r}.")
        if not _has_type(value, hints[name]):
            raise ProtocolError(f"Field {name!r} of a {kind} message has the wrong type.")
    try:
        return message_type(**body), fd_count
    except TypeError as error:
        raise ProtocolError(f"A {kind} message lacks a field.") from error


def _check_values(body: dict[str, Any]) -> None:
    """Raise ProtocolError if a number is out of range, or values are nested too deep."""
    level: list[Any] = [body]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for each in level:
            below += each.values() if type(each) is dict else each
        level = []
        for value in below:
            kind = type(value)
            if kind is dict or kind is list:
                level.append(value)
            elif (kind is int and value not in _INTEGERS) or (
                kind is float and not math.isfinite(value)
            ):
                raise ProtocolError("A message has a number that is out of range.")
        if not level:
            return
    raise ProtocolError("A message is nested too deep.")


def _refuse_constant(name: str) -> None:
    """Reject NaN and infinities, which are not JSON and not valid in any field."""
    raise ValueError(name)


def _has_type(value: object, hint: Any) -> bool:
    """True if a JSON value has a field's declared type; integers are accepted as floats."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(value, each) for each in typing.get_args(hint))
    if origin is Literal:
        return type(value) is str  # a newer peer may have further words
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_has_type(each, item) for each in value)
    if origin is dict or typing.is_typeddict(hint):
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, float) or type(value) is int
    return type(value) is hint


@dataclass
class FrameDecoder:
    """Splits a byte stream into messages and assigns each its descriptors.

    It owns descriptors that were received and not handed out; `close` closes them.

    Parameters
    ----------
    bounds : Bounds
    """

    bounds: Bounds = DEFAULT_BOUNDS
    _bytes: bytearray = field(default_factory=bytearray)
    _fds: deque[int] = field(default_factory=deque)

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Add the result of one ``recvmsg``; takes ownership of the descriptors."""
        self._bytes += data
        self._fds.extend(fds)

    def next_message(self) -> tuple[Message, list[int]] | None:
        """Return the next complete message with its descriptors, which the caller then owns.

        Raises
        ------
        ProtocolError
            If the stream does not consist of messages; reading cannot continue.
        """
        end = _LENGTH.size
        if len(self._bytes) >= end:
            (length,) = _LENGTH.unpack_from(self._bytes)
            self._check_length(length)
            end += length
        if len(self._bytes) < end:
            if len(self._fds) > self.bounds.fds:
                raise ProtocolError("Descriptors came that no message asked for.")
            return None
        message, fd_count = decode(bytes(self._bytes[_LENGTH.size : end]), self.bounds)
        del self._bytes[:end]
        if fd_count > len(self._fds) or (not self._bytes and fd_count < len(self._fds)):
            raise ProtocolError("A message came with the wrong number of descriptors.")
        return message, [self._fds.popleft() for _ in range(fd_count)]

    def _check_length(self, length: int) -> None:
        """Raise ProtocolError if a message is too large, as soon as this is known."""
        most = self.bounds.frame_bytes
        if SMALL_BYTES_MAX < length <= most:
            begin = bytes(self._bytes[_LENGTH.size : _LENGTH.size + _KIND_BYTES])
            if len(begin) < _KIND_BYTES:
                return
            found = _KIND.match(begin)
            kind = _KINDS.get(found.group(1).decode("ascii", "replace")) if found else None
            most = min(most, SMALL_BYTES_MAX if kind is None else kind.frame_bytes_max)
        if length > most:
            raise ProtocolError(f"A message is too large: {length} bytes, {most} are allowed.")

    def __len__(self) -> int:
        """Number of bytes that were received and not yet returned in a message."""
        return len(self._bytes)

    @property
    def fd_count(self) -> int:
        """Number of descriptors that were received and not yet handed out."""
        return len(self._fds)

    def missing(self) -> int:
        """Number of bytes missing from the current message; 0 before its length is known."""
        if len(self._bytes) < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._bytes)
        return _LENGTH.size + int(length) - len(self._bytes)

    def close(self) -> None:
        """Close the descriptors that were not handed out."""
        while self._fds:
            os.close(self._fds.popleft())


def receive_bytes(
    sock: socket.socket, size: int, discard: Callable[[int], object] = os.close
) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes and the descriptors that came with them (close-on-exec).

    Parameters
    ----------
    sock : socket.socket
    size : int
    discard : callable
        Closes a descriptor that is not returned.

    Raises
    ------
    ProtocolError
        If more descriptors came than any message may carry.
    """
    data, ancillary, flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            discard(fd)
        raise ProtocolError("Too many descriptors came with a message.")
    return data, list(fds)


def send_message(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message over a blocking socket; the caller still owns the descriptors.

    Raises
    ------
    OSError
        If the peer is gone (``BrokenPipeError``) or the socket's timeout passed.
    """
    send_frame(sock, encode(message, len(fds)), fds)


def send_frame(sock: socket.socket, frame: bytes, fds: Sequence[int] = ()) -> None:
    """Send a frame made by `encode`; raises as `send_message`."""
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else 0
    if sent < len(frame):  # else the peer may have received all and be gone
        sock.sendall(frame[sent:])


def recv_message(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message over a blocking socket; the caller owns its descriptors.

    Raises
    ------
    ConnectionError
        If the peer closed the connection.
    ProtocolError
        If the received data is not a message.
    TimeoutError
        If the socket's timeout passed.
    """
    decoder = FrameDecoder()
    try:
        wanted = _LENGTH.size  # never beyond this frame: the rest is for the next call
        while True:
            while wanted:
                data, fds = receive_bytes(sock, min(wanted, 1 << 16))
                if not data:
                    raise ConnectionError("The other side closed the connection.")
                decoder.feed(data, fds)
                wanted -= len(data)
            found = decoder.next_message()
            if found is not None:
                return found
            wanted = decoder.missing()
    finally:
        decoder.close()
