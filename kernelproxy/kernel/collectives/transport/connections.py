"""One connection between the processes of two ranks, as its sender and as its receiver see it."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import socket
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernelproxy.kernel.collectives.transport.frames import (
    HEADER_BYTES,
    FrameKind,
    Header,
    text_bytes,
)
from kernelproxy.kernel.collectives.transport.outbox import SharedMemory

Waiting = Callable[[], "contextlib.AbstractContextManager[None]"]


@dataclass(frozen=True)
class Frame:
    """A frame that has arrived."""

    header: Header
    content: torch.Tensor
    """Its bytes, one-dimensional."""


class PeerLostError(Exception):
    """The process of a peer has ended."""


class Peer:
    """The process of another rank: the connection to it, if there is one, and whether it lives."""

    def __init__(self, token: str, connection: socket.socket | None) -> None:
        self.token = token
        self.lost = False
        self.connection = connection
        self._lock = threading.Lock()
        self._rest = b""

    def greet(self, hello: bytes, outbox: int | None) -> None:
        """Send the first frame, with the descriptor of an outbox.

        Raises
        ------
        PeerLostError
            Its process has ended.
        """
        try:
            if self.connection is None:
                raise PeerLostError
            descriptors = [] if outbox is None else [outbox]
            # It fits into the empty buffer of a new connection.
            socket.send_fds(self.connection, [hello], descriptors)
        except OSError as error:
            raise PeerLostError from error

    def send(self, header: bytes, content: memoryview, waiting: Waiting) -> None:
        """Send one frame.

        An interrupt leaves the rest of the frame for the next call.

        Raises
        ------
        PeerLostError
            Its process has ended.
        """
        with self._lock:
            parts = [memoryview(self._rest), memoryview(header), content]
            self._rest = b""
            try:
                while parts := [part for part in parts if len(part)]:
                    sent = self._send_some(parts, waiting)
                    for position, part in enumerate(parts):
                        taken = min(sent, len(part))
                        parts[position] = part[taken:]
                        sent -= taken
            except OSError as error:
                raise PeerLostError from error
            except BaseException:
                self._rest = b"".join(parts)
                raise

    @property
    def local(self) -> bool:
        """True if it is a process of this host."""
        return self.connection is not None and self.connection.family == socket.AF_UNIX

    def _send_some(self, parts: list[memoryview], waiting: Waiting) -> int:
        if self.connection is None:
            raise PeerLostError
        try:
            return self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            with waiting():
                return self.connection.sendmsg(parts)


class Incoming:
    """A connection from a peer, and the frame that is being received."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self.connection = connection
        self.token = ""
        self._secret = secret
        self._fixed = bytearray(HEADER_BYTES)
        self._text: bytearray | None = None
        self._content: torch.Tensor | None = None
        self._left = memoryview(self._fixed)
        self._shared: SharedMemory | None = None

    def read(self) -> tuple[list[Frame], bool]:
        """Read what has arrived, up to one frame with content.

        A peer that sends meanwhile cannot make it read without end.

        Returns
        -------
        frames : list of Frame
            Those that are complete.
        open : bool
            Whether the connection is still open.

        Raises
        ------
        ValueError
            The connection is not one of a rank.
        """
        frames: list[Frame] = []
        while True:
            while len(self._left):
                try:
                    count = self._receive()
                except BlockingIOError:
                    return frames, True
                except OSError:
                    return frames, False
                if not count:
                    return frames, False
                self._left = self._left[count:]
            if (frame := self._advance()) is not None:
                frames.append(frame)
                if len(frame.content):
                    return frames, True

    def _receive(self) -> int:
        if self.token or self.connection.family != socket.AF_UNIX:
            return self.connection.recv_into(self._left)
        # The first frame brings the outbox.
        space = socket.CMSG_SPACE(array("i").itemsize)
        count, ancillary, *_ = self.connection.recvmsg_into(
            [self._left], space, socket.MSG_CMSG_CLOEXEC
        )
        for _, _, data in ancillary:
            (fd,) = array("i", data)
            self._shared = SharedMemory(fd)
        return count

    def _advance(self) -> Frame | None:
        """Go to the next part of the frame; return the frame after its last part."""
        if self._text is None:
            self._text = bytearray(text_bytes(self._fixed))
            self._left = memoryview(self._text)
            return None
        header = Header.decode(self._fixed, self._text)
        if not self.token:
            self._identify(header)
        elif header.place is not None:
            if self._shared is None:
                raise ValueError("a rank without an outbox names memory in it")
            frame = Frame(header, self._shared.take(header.place, header.length))
            self._begin()
            return frame
        elif self._content is None:
            self._content = torch.empty(header.length, dtype=torch.uint8)
            self._left = bytes_of(self._content)
            return None
        else:
            frame = Frame(header, self._content)
            self._begin()
            return frame
        self._begin()
        return None

    def _begin(self) -> None:
        self._text = self._content = None
        self._left = memoryview(self._fixed)

    def _identify(self, header: Header) -> None:
        secret, token = header.text[: len(self._secret)], header.text[len(self._secret) :]
        if header.kind is not FrameKind.hello or not hmac.compare_digest(secret, self._secret):
            raise ValueError("it is not a rank of a group of this process")
        self.token = token


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host, which the caller keeps alive."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B")
