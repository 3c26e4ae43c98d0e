"""Messages as frames on stream sockets (standard library only).

A frame is a ``u32`` length (little-endian), then a JSON object ``{"kind": "OpenSession",
...fields}``. Descriptors travel by ``SCM_RIGHTS`` with the first bytes of their frame, whose object
then also counts them (``"fds": 4``), so that a reader which took several frames at once knows whose
they are. Decoding is strict: unknown kinds and fields, missing fields and wrong types raise
`ProtocolError`; nothing is ever unpickled.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelproxy.errors import ProtocolError
from kernelproxy.protocol import Message

FRAME_BYTES_MAX = 16 << 20
FDS_MAX = 16
_LENGTH = struct.Struct("<I")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)

MessageType = type[Message]

_KINDS: dict[str, MessageType] = {each.__name__: each for each in Message.__subclasses__()}
_HINTS = {each: typing.get_type_hints(each) for each in _KINDS.values()}


def encode(message: Message, fd_count: int = 0) -> bytes:
    """Encode a message as a frame.

    Raises
    ------
    ProtocolError
        If the frame would be longer than `FRAME_BYTES_MAX`, or carry too many descriptors.
    """
    body: dict[str, Any] = {"kind": type(message).__name__, **vars(message)}
    if fd_count:
        body["fds"] = fd_count
    text = json.dumps(body, separators=(",", ":")).encode()
    if len(text) > FRAME_BYTES_MAX or fd_count > FDS_MAX:
        raise ProtocolError(f"A {body['kind']} message is too large to be sent.")
    return _LENGTH.pack(len(text)) + text


def decode(text: bytes) -> tuple[Message, int]:
    """Decode the body of a frame into a message and the number of its descriptors.

    Raises
    ------
    ProtocolError
        If it is anything but a known message with exactly its fields.
    """
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("A message is not JSON.") from error
    if not isinstance(body, dict):
        raise ProtocolError("A message is not a JSON object.")
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


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are no JSON and which no field means."""
    raise ValueError(name)


def _has_type(value: object, hint: Any) -> bool:
    """Whether a JSON value is of a field's declared type; integers count as floats."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(value, each) for each in typing.get_args(hint))
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_has_type(each, item) for each in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, float) or type(value) is int
    return type(value) is hint


@dataclass
class FrameDecoder:
    """Cuts a byte stream into messages and gives each its descriptors.

    Descriptors that were received and not handed out are owned, and closed by `close`.
    """

    _bytes: bytearray = field(default_factory=bytearray)
    _fds: deque[int] = field(default_factory=deque)

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Take what one ``recvmsg`` returned."""
        self._bytes += data
        self._fds.extend(fds)

    def next_message(self) -> tuple[Message, list[int]] | None:
        """Return the next whole message with its descriptors, which become the caller's.

        Raises
        ------
        ProtocolError
            If the stream is not made of messages; it cannot be read on.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > FRAME_BYTES_MAX:
            raise ProtocolError("A message is too large.")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            if len(self._fds) > FDS_MAX:
                raise ProtocolError("Descriptors came that no message asked for.")
            return None
        message, fd_count = decode(bytes(self._bytes[_LENGTH.size : end]))
        del self._bytes[:end]
        if fd_count > len(self._fds) or (not self._bytes and fd_count < len(self._fds)):
            raise ProtocolError("A message came with the wrong number of descriptors.")
        return message, [self._fds.popleft() for _ in range(fd_count)]

    def __len__(self) -> int:
        """Bytes that came and were not taken."""
        return len(self._bytes)

    def missing(self) -> int:
        """Bytes that the message which has begun still lacks; 0 before its length is known."""
        if len(self._bytes) < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._bytes)
        return _LENGTH.size + int(length) - len(self._bytes)

    def close(self) -> None:
        """Close descriptors that no message claimed."""
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
    """Send a message over a blocking socket; the descriptors stay the caller's.

    Raises
    ------
    OSError
        If the peer is gone (``BrokenPipeError``) or the socket's timeout passed.
    """
    frame = encode(message, len(fds))
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else 0
    if sent < len(frame):  # else the peer may be gone already, with all of it
        sock.sendall(frame[sent:])


def recv_message(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message over a blocking socket; its descriptors become the caller's.

    Raises
    ------
    ConnectionError
        If the peer closed the connection.
    ProtocolError
        If what came is no message.
    TimeoutError
        If the socket's timeout passed.
    """
    decoder = FrameDecoder()
    try:
        wanted = _LENGTH.size  # never beyond this frame: the rest is the next call's
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
