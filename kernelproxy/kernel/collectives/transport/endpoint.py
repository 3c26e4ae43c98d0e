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
import json
import os
import secrets
import selectors
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kernelproxy.common.ipc import detach
from kernelproxy.kernel.collectives.transport.addresses import (
    connect,
    copy_of,
    host_identity,
    listener,
    local_name,
    reachable_address,
    same_user,
)
from kernelproxy.kernel.collectives.transport.connections import (
    Frame,
    Incoming,
    Peer,
    PeerLostError,
    bytes_of,
)
from kernelproxy.kernel.collectives.transport.frames import FrameKind, Header
from kernelproxy.kernel.collectives.transport.outbox import Outbox
from kernelproxy.kernel.collectives.transport.waits import Waits, waits

#: What is received before a call asks for it, at most, while this rank computes.
EARLY_BYTES_MAX = 256 << 20
Stream = tuple[int, int, FrameKind, int]
"""Group, source, kind, tag: frames of one arrive in the order in which they were sent."""


class SessionEndedError(Exception):
    """The device session of this rank has ended."""


class Endpoint:
    """The frames that this process has received, and its peers.

    Parameters
    ----------
    local : bool
        Use the sockets of the host; without it, TCP with all peers.
    waits : Waits, optional
        Those of the rank.
    """

    def __init__(self, *, local: bool = True, waits: Waits | None = None) -> None:
        self._waits = waits or Waits()
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
        self._incoming: set[Incoming] = set()
        # Peers to which there is no connection, for the endpoint's thread.
        self._ended: list[Peer] = []
        self._selector = selectors.DefaultSelector()
        # Its thread reads the second one.
        self._bell = socket.socketpair()
        self._connecting = threading.Lock()
        #: What it gives to ranks of its host.
        self.outbox = Outbox()
        self._selector.register(self._bell[1], selectors.EVENT_READ, self._resume)
        self._listeners: list[socket.socket] = []
        self.address = self._listen(local)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="sing-collectives", daemon=True)
        self._thread.start()

    def _listen(self, local: bool) -> str:
        """Listen for peers; return where, as text for them."""
        found: dict[str, object] = {"token": self.token}
        if local:
            self._listeners.append(listener(socket.AF_UNIX, local_name(self.token)))
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
        """While the calling thread waits for peers and can do nothing else."""
        with self.changed:
            self._waiting += 1
            if self._paused:
                self._bell[0].send(b"\0")
        try:
            with self._waits.for_peers():
                yield
        finally:
            with self.changed:
                self._waiting -= 1

    def peer(self, address: str) -> Peer:
        """Return the process at an address, connected if it has not ended."""
        place = json.loads(address)
        with self._connecting:
            if found := self._peers.get(place["token"]):
                return found
            hello = Header(FrameKind.hello, text=place["token"] + self.token).encode()
            # If this process is saved meanwhile, the peer may have another name afterwards.
            with detach.current.connecting():
                connection = self._connect(place)
            peer = self._peers[place["token"]] = Peer(place["token"], connection)
            try:
                shares = peer.local and self.outbox.fd >= 0
                peer.greet(hello, self.outbox.fd if shares else None)
            except PeerLostError:
                self._ended.append(peer)
                self._bell[0].send(b"\0")
            except BaseException:  # interrupted: the next call connects again
                del self._peers[place["token"]]
                raise
            else:
                assert peer.connection is not None
                self._selector.register(
                    peer.connection, selectors.EVENT_READ, lambda: self._watch(peer)
                )
            return peer

    def _connect(self, place: dict[str, Any]) -> socket.socket | None:
        listens = self._listeners[0]
        local = listens.family == socket.AF_UNIX
        return connect(place, copy_of(listens, self.token) if local else "")

    def send(self, peer: Peer, header: Header, content: torch.Tensor | None) -> None:
        """Send a frame with a contiguous tensor; in the outbox, it may be changed no more.

        Raises
        ------
        PeerLostError
            The peer's process has ended.
        RuntimeError
            It has ended because a collective of the group has failed; the text says why.
        """
        data = memoryview(b"")
        if content is not None:
            place = self.outbox.give(content, peer) if peer.local else None
            header = replace(header, length=content.nbytes, place=place)
            data = data if place else bytes_of(content)
        try:
            peer.send(header.encode(), data, self.waiting)
        except PeerLostError:
            with self.changed, self.waiting():  # until all is read that it has sent
                self.changed.wait_for(lambda: peer.lost or header.group in self.failures)
            if text := self.failures.get(header.group):
                raise RuntimeError(text) from None
            raise

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
        for held in (*self._listeners, *self._bell):
            held.close()
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.close()
        for incoming in self._incoming:
            incoming.connection.close()
        self._incoming.clear()
        self._selector.close()
        self.outbox.abandon()

    def close(self) -> None:
        """End the thread, and all connections; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._bell[0].send(b"\0")
        self._thread.join()
        self.outbox.close()
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
                    incoming = Incoming(connection, self.token)
                    self._incoming.add(incoming)
                    if not self._paused:
                        self._register(incoming)

    def _register(self, incoming: Incoming) -> None:
        self._selector.register(
            incoming.connection, selectors.EVENT_READ, lambda: self._read(incoming)
        )

    def _read(self, incoming: Incoming) -> None:
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
        self._bell[1].recv(4096)
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


_endpoint: Endpoint | None = None
_creating = threading.Lock()


def endpoint() -> Endpoint:
    """Return the endpoint of this process; the first call makes it."""
    global _endpoint
    with _creating:
        if _endpoint is None:
            _endpoint = Endpoint(waits=waits)
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
