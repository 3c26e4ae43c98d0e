"""Bytes between the processes of ranks: one endpoint for each process, one connection each way.

A thread of the endpoint receives all that peers send, so that sending never waits for the call that
will use it: two ranks that send to each other do not block each other. Waiting has no time limit,
since a peer may be suspended for long; it ends when the peer's process has ended, which its closed
connections show, and it can be interrupted.

Ranks of one host use sockets in its abstract namespace, which only processes of the same user may
use; others TCP, with a secret that comes from the store of the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernelproxy.kernel.activation import state
from kernelproxy.kernel.collectives.addresses import (
    host_identity,
    listener,
    reachable_address,
    same_user,
)
from kernelproxy.kernel.collectives.frames import HEADER_BYTES, FrameKind, Header, text_bytes

#: What is received before a call asks for it, at most, while this rank computes.
EARLY_BYTES_MAX = 256 << 20
Stream = tuple[int, int, FrameKind, int]
"""Group, source, kind, tag: frames of one arrive in the order in which they were sent."""


@dataclass(frozen=True)
class Frame:
    """A frame that has arrived."""

    header: Header
    content: torch.Tensor
    """Its bytes, one-dimensional."""


class PeerLostError(Exception):
    """The process of a peer has ended."""


class SessionEndedError(Exception):
    """The device session of this rank has ended."""


class Peer:
    """The process of another rank: the connection to it, if there is one, and whether it lives."""

    def __init__(self, token: str, connection: socket.socket | None) -> None:
        self.token = token
        self.lost = False
        self.connection = connection
        self._lock = threading.Lock()
        self._rest = b""

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

    def _send_some(self, parts: list[memoryview], waiting: Waiting) -> int:
        if self.connection is None:
            raise PeerLostError
        try:
            return self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            with waiting():
                return self.connection.sendmsg(parts)


Waiting = Callable[[], "contextlib.AbstractContextManager[None]"]


class Endpoint:
    """The frames that this process has received, and its peers.

    Parameters
    ----------
    local : bool
        Use the sockets of the host; without it, TCP with all peers.
    on_wait : callable
        Called with True when this rank begins to wait for peers, and with False when it ends.
    """

    def __init__(
        self, *, local: bool = True, on_wait: Callable[[bool], object] = lambda waiting: None
    ) -> None:
        self._on_wait = on_wait
        self.token = secrets.token_hex(16)
        #: Notified at each frame, failure and loss.
        self.changed = threading.Condition()
        self.failures: dict[int, str] = {}
        #: Whether the device session of this rank has ended.
        self.session_ended = False
        self._arrived: dict[Stream, deque[Frame]] = defaultdict(deque)
        self._arrived_bytes = 0
        self._waiting = 0
        self._paused = False
        self._peers: dict[str, Peer] = {}
        self._incoming: set[_Incoming] = set()
        # Peers to which there is no connection, for the endpoint's thread.
        self._ended: list[Peer] = []
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._woken = socket.socketpair()
        self._connecting = threading.Lock()
        self._selector.register(self._woken, selectors.EVENT_READ, self._resume)
        self._listeners: list[socket.socket] = []
        self.address = self._listen(local)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="sing-collectives", daemon=True)
        self._thread.start()

    def _listen(self, local: bool) -> str:
        """Listen for peers; return where, as text for them."""
        found: dict[str, object] = {"token": self.token}
        if local:
            name = f"\0jupyter-sing-rank-{self.token}"
            self._listeners.append(listener(socket.AF_UNIX, name))
            found["host"] = host_identity()
        host = reachable_address()
        if not local or not host.startswith("127."):
            made = listener(socket.AF_INET, (host, 0))
            self._listeners.append(made)
            found["tcp"] = [host, made.getsockname()[1]]
        for each in self._listeners:
            self._selector.register(each, selectors.EVENT_READ, self._accept)
        return json.dumps(found)

    # ------------------------------------------------------------ for callers

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While this rank waits for its peers and can do nothing else."""
        with self.changed:
            self._waiting += 1
            if self._waiting == 1:
                self._on_wait(True)
            if self._paused:
                self._wake_end.send(b"\0")
        try:
            yield
        finally:
            with self.changed:
                self._waiting -= 1
                if self._waiting == 0:
                    self._on_wait(False)

    def peer(self, address: str) -> Peer:
        """Return the process at an address, connected if it has not ended."""
        place = json.loads(address)
        with self._connecting:
            if found := self._peers.get(place["token"]):
                return found
            hello = Header(FrameKind.hello, text=place["token"] + self.token).encode()
            peer = self._peers[place["token"]] = Peer(place["token"], self._connect(place))
            try:
                peer.send(hello, memoryview(b""), self.waiting)
            except PeerLostError:
                self._ended.append(peer)
                self._wake_end.send(b"\0")
            else:
                assert peer.connection is not None
                self._selector.register(
                    peer.connection, selectors.EVENT_READ, lambda: self._watch(peer)
                )
            return peer

    def _connect(self, place: dict[str, Any]) -> socket.socket | None:
        """Return a connection to a process, or None if there is none."""
        local = place.get("host") == host_identity()
        if not local and "tcp" not in place:
            return None  # it listens on its own host only
        connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        try:
            if local:
                connection.connect(f"\0jupyter-sing-rank-{place['token']}")
            else:
                connection.connect(tuple(place["tcp"]))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def receive(self, stream: Stream, peer: Peer) -> Frame:
        """Wait for the next frame of a stream.

        Raises
        ------
        PeerLostError
            The peer's process has ended.
        SessionEndedError
            The result could not be used.
        RuntimeError
            A collective of the group has failed; the text says why.
        """
        with self.changed:
            if not (self._arrived.get(stream) or self._problem(stream, peer)):
                with self.waiting():
                    self.changed.wait_for(
                        lambda: self._arrived.get(stream) or self._problem(stream, peer)
                    )
            frame = self._take(stream)
            if frame is None:
                if text := self.failures.get(stream[0]):
                    raise RuntimeError(text)
                if self.session_ended:
                    raise SessionEndedError
                raise PeerLostError
            return frame

    def _problem(self, stream: Stream, peer: Peer) -> bool:
        return peer.lost or self.session_ended or stream[0] in self.failures

    def next_number(self, stream: Stream) -> int | None:
        """Return the number of the next frame of a stream if it has arrived."""
        with self.changed:
            arrived = self._arrived.get(stream)
            return arrived[0].header.number if arrived else None

    def _take(self, stream: Stream) -> Frame | None:
        arrived = self._arrived.get(stream)
        if not arrived:
            return None
        frame = arrived.popleft()
        if not arrived:
            del self._arrived[stream]
        self._arrived_bytes -= len(frame.content)
        return frame

    def forget(self, group: int) -> None:
        """Drop what has arrived for a group that was destroyed."""
        with self.changed:
            for stream in [each for each in self._arrived if each[0] == group]:
                while self._take(stream):
                    pass

    def end_session(self) -> None:
        """Let this rank wait no more, now and later; its device is gone."""
        with self.changed:
            self.session_ended = True
            self.changed.notify_all()

    def abandon(self) -> None:
        """Close all descriptors; for a child of this process, where there is no thread."""
        self._closing = True
        for held in (*self._listeners, self._woken, self._wake_end):
            held.close()
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.close()
        for incoming in self._incoming:
            incoming.connection.close()
        self._selector.close()

    def close(self) -> None:
        """End the thread, and all connections; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake_end.send(b"\0")
        self._thread.join()
        self.abandon()

    # ------------------------------------------------------------ on the endpoint's thread

    def _serve(self) -> None:
        while not self._closing:
            # New connections before ends of connections: see _watch.
            events = self._selector.select()
            for key, _ in sorted(events, key=lambda event: event[0].data != self._accept):
                key.data()

    def _accept(self) -> None:
        for each in self._listeners:
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, _ = each.accept()
                    if each.family == socket.AF_UNIX and not same_user(connection):
                        connection.close()
                        continue
                    connection.setblocking(False)
                    incoming = _Incoming(connection, self.token)
                    self._incoming.add(incoming)
                    if not self._paused:
                        self._register(incoming)

    def _register(self, incoming: _Incoming) -> None:
        self._selector.register(
            incoming.connection, selectors.EVENT_READ, lambda: self._read(incoming)
        )

    def _read(self, incoming: _Incoming) -> None:
        try:
            frames, open_ = incoming.read()
        except (OSError, ValueError):  # reset, or not a rank
            frames, open_ = [], False
        with self.changed:
            for frame in frames:
                header = frame.header
                if header.kind is FrameKind.failure:
                    self.failures.setdefault(header.group, header.text)
                    continue
                tag = header.number if header.kind is FrameKind.message else 0
                stream = (header.group, header.source, header.kind, tag)
                self._arrived[stream].append(frame)
                self._arrived_bytes += len(frame.content)
            if not open_:
                with contextlib.suppress(KeyError):  # while reading is paused
                    self._selector.unregister(incoming.connection)
                incoming.connection.close()
                self._incoming.discard(incoming)
                if (peer := self._peers.get(incoming.token)) is not None:
                    peer.lost = True
            if frames or not open_:
                self.changed.notify_all()
            if self._arrived_bytes > EARLY_BYTES_MAX and not self._waiting and not self._paused:
                self._paused = True
                for each in self._incoming:
                    self._selector.unregister(each.connection)

    def _resume(self) -> None:
        self._woken.recv(4096)
        while self._ended:
            self._watch(self._ended.pop())
        with self.changed:
            if self._paused:
                self._paused = False
                for each in self._incoming:
                    self._register(each)

    def _watch(self, peer: Peer) -> None:
        """Handle the end of the connection to a peer, which never sends anything on it."""
        if peer.connection is not None:
            with contextlib.suppress(KeyError):  # it ended before it was registered
                self._selector.unregister(peer.connection)
        # What it sent may not have been read yet: then the end of that connection counts.
        self._accept()
        for incoming in [each for each in self._incoming if not each.token]:
            self._read(incoming)
        if not any(each.token == peer.token for each in self._incoming):
            with self.changed:
                peer.lost = True
                self.changed.notify_all()


class _Incoming:
    """A connection from a peer, and the frame that is being received."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self.connection = connection
        self.token = ""
        self._secret = secret
        self._fixed = bytearray(HEADER_BYTES)
        self._text: bytearray | None = None
        self._content: torch.Tensor | None = None
        self._left = memoryview(self._fixed)

    def read(self) -> tuple[list[Frame], bool]:
        """Read what has arrived; return the frames that are complete, and if it is still open.

        Raises
        ------
        ValueError
            The connection is not one of a rank.
        """
        frames: list[Frame] = []
        while True:
            while len(self._left):
                try:
                    count = self.connection.recv_into(self._left)
                except BlockingIOError:
                    return frames, True
                except OSError:
                    return frames, False
                if not count:
                    return frames, False
                self._left = self._left[count:]
            if (frame := self._advance()) is not None:
                frames.append(frame)

    def _advance(self) -> Frame | None:
        """Go to the next part of the frame; return the frame after its last part."""
        if self._text is None:
            self._text = bytearray(text_bytes(self._fixed))
            self._left = memoryview(self._text)
            return None
        header = Header.decode(self._fixed, self._text)
        if not self.token:
            self._identify(header)
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


_endpoint: Endpoint | None = None
_creating = threading.Lock()


def endpoint() -> Endpoint:
    """Return the endpoint of this process; the first call makes it."""
    global _endpoint
    with _creating:
        if _endpoint is None:
            _endpoint = Endpoint(on_wait=state.await_peers)
            atexit.register(_endpoint.close)
        return _endpoint


def end_session() -> None:
    """Called when the device session of this process has ended; from any thread."""
    with _creating:
        if _endpoint is not None:
            _endpoint.end_session()


def _leave_to_parent() -> None:
    global _endpoint, _creating
    _creating = threading.Lock()
    if _endpoint is not None:
        # Else a child that outlives this process would hide from its peers that it has ended.
        _endpoint.abandon()
        _endpoint = None


os.register_at_fork(after_in_child=_leave_to_parent)
