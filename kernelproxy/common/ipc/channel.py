"""Messages and descriptors over a socket, for the agent's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kernelproxy.common.errors import ProtocolError
from kernelproxy.common.ipc.fd_validation import BOUNDS, Guard
from kernelproxy.common.ipc.framing import DEFAULT_BOUNDS, FrameDecoder, encode, receive_bytes
from kernelproxy.common.ipc.peer import Owner
from kernelproxy.common.protocol import Message

_READ_BYTES = 1 << 16
_PEER = struct.Struct("3i")


class Channel:
    """One end of a connection. Owns its socket.

    One task may receive at a time; any number may send.

    Parameters
    ----------
    sock : socket.socket
    guard : Guard, optional
        Checks received descriptors.
    """

    def __init__(self, sock: socket.socket, guard: Guard | None = None) -> None:
        sock.setblocking(False)
        self._sock, self._guard = sock, guard
        self._decoder = FrameDecoder(DEFAULT_BOUNDS if guard is None else BOUNDS)
        self._sending = asyncio.Lock()
        self._waits: set[asyncio.Future[None]] = set()
        #: Called once when it is closed.
        self.on_close: Callable[[], object] = lambda: None

    def another(self, sock: socket.socket) -> Channel:
        """Return a channel for another connection to the peer, guarded in the same way."""
        return Channel(sock, None if self._guard is None else self._guard.for_another())

    def peer(self) -> tuple[int, int]:
        """Return the process id and user id of the peer, from the OS kernel."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(raw)
        return pid, uid

    def owner(self) -> Owner:
        """Return the peer's user, with their groups."""
        return Owner.at(self._sock)

    def charged(self, work: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        """Wrap a coroutine that serves this connection: its loop time is charged to the user."""
        share = None if self._guard is None else self._guard.share
        return work if share is None else share.charge(work)

    async def turn(self) -> None:
        """Wait until the peer's user may use the loop again: see Note [Fairness]."""
        if self._guard is not None:
            await self._guard.turn()

    async def receive(self) -> tuple[Message, list[int]]:
        """Wait for a message; the caller owns its descriptors.

        Raises
        ------
        ConnectionError
            At the end of the connection.
        ProtocolError
            If the received data is not a message; reading cannot continue.
        """
        while True:
            await self.turn()
            found = self._decoder.next_message()
            if self._guard is not None:
                self._guard.hold(len(self._decoder), self._decoder.fd_count)
            if found is not None:
                return found
            try:
                data, fds = self._receive()
            except BlockingIOError:
                await self._wait(asyncio.get_running_loop().add_reader, reading=True)
                continue
            if not data:
                raise ConnectionError("The other side closed the connection.")
            self._decoder.feed(data, fds)
            # A peer that sends without pause must not block the loop.
            await asyncio.sleep(0)

    async def wait_disconnected(self) -> None:
        """Wait until the peer disconnects; only while no task is in `receive`.

        If the peer sends data instead, this leaves it to `receive` and does not return.
        """
        while True:
            await self._wait(asyncio.get_running_loop().add_reader, reading=True)
            with contextlib.suppress(BlockingIOError):
                if not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return
                await asyncio.get_running_loop().create_future()

    def _receive(self) -> tuple[bytes, list[int]]:
        if self._guard is None:
            return receive_bytes(self._sock, _READ_BYTES)
        data, fds = receive_bytes(self._sock, _READ_BYTES, self._guard.discard)
        return data, self._guard.check(fds)

    async def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; the caller still owns the descriptors.

        Raises
        ------
        OSError
            If the other side is gone.
        """
        frame = memoryview(encode(message, len(fds)))
        async with self._sending:
            while frame:
                try:
                    if fds:
                        sent = socket.send_fds(self._sock, [frame], list(fds))
                        fds = ()
                    else:
                        sent = self._sock.send(frame)
                except BlockingIOError:
                    await self._wait(asyncio.get_running_loop().add_writer, reading=False)
                    continue
                frame = frame[sent:]

    async def _wait(self, add: Callable[..., object], *, reading: bool) -> None:
        """Wait until the socket is readable, or writable."""
        loop = asyncio.get_running_loop()
        if self._sock.fileno() < 0:
            raise ConnectionError("The connection is closed.")
        ready: asyncio.Future[None] = loop.create_future()
        self._waits.add(ready)
        add(self._sock, _settle, ready)
        try:
            await ready
        finally:
            self._waits.discard(ready)
            if self._sock.fileno() >= 0:
                (loop.remove_reader if reading else loop.remove_writer)(self._sock)

    def end(self) -> None:
        """Send no more: the other side sees the end of the connection. Idempotent."""
        with contextlib.suppress(OSError):  # it is closed, or has ended
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection: tasks that wait on it get a ConnectionError."""
        if self._sock.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._sock.close()
        self._decoder.close()
        if self._guard is not None:
            self._guard.hold(0)
        self.on_close()
        for ready in self._waits:
            if not ready.done():
                ready.set_exception(ConnectionError("The connection is closed."))


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def close_fds(fds: Sequence[int]) -> None:
    """Close the unwanted descriptors of a message."""
    for fd in fds:
        os.close(fd)


def expect(reply: tuple[Message, list[int]], fd_count: int = 0) -> Message:
    """Check that a reply has `fd_count` descriptors, and return its message.

    Raises
    ------
    ProtocolError
        If there are more or fewer; they are closed.
    """
    message, fds = reply
    if len(fds) != fd_count:
        close_fds(fds)
        raise ProtocolError(f"A {type(message).__name__} message came with {len(fds)} descriptors.")
    return message
