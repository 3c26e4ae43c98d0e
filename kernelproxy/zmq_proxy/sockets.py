"""The two sides of a ZMQ proxy: sockets for clients, and sockets to the kernel's process."""

from __future__ import annotations

import secrets
import time

import zmq

from kernelproxy.zmq_proxy.connection import CHANNELS, Connection
from kernelproxy.zmq_proxy.messages import Frames, Signer

#: Limit of messages queued for a client that does not read. Kernels drop messages beyond a
#: thousand; forwarded messages come in bursts.
_MESSAGES_MAX = 10_000
#: Milliseconds for the last messages to clients, such as the reply to a shutdown; as in kernels.
_LINGER = 1000
#: Milliseconds until the next attempt to connect to a kernel that does not listen yet.
_RETRY, _RETRY_MAX = 20, 100
#: Seconds until a probe is repeated: after a reply without its output; and without a reply, at
#: first and at most. A restored process may have used another key when it received the probe.
_UNSEEN, _UNANSWERED, _UNANSWERED_MAX = 0.05, 0.25, 30.0


class Front:
    """Sockets at the addresses where the clients expect the kernel.

    Raises
    ------
    zmq.ZMQError
        If a port is in use.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], connection: Connection) -> None:
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        try:
            for channel in CHANNELS:
                kind = zmq.XPUB if channel == "iopub" else zmq.ROUTER
                sock = self.sockets[channel] = context.socket(kind)
                sock.linger = _LINGER
                sock.set_hwm(_MESSAGES_MAX)
                if kind == zmq.ROUTER:
                    sock.router_handover = 1  # as in kernels: clients keep their routing ids
                sock.bind(connection.url(channel))
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, channel: str, frames: Frames | list[bytes]) -> None:
        """Send a message to its client, or to all; ignore it if the client has disconnected."""
        _send(self.sockets[channel], frames)

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets.values():
            sock.close()


class Back:
    """Connections to one process of a kernel, which are probed before they are used.

    It is *ready* when it has replied to the proxy's probes, and its output for them has arrived: a
    publisher drops messages that have no subscriber yet.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], connection: Connection, signer: Signer
    ) -> None:
        self._signer = signer
        self._probes: dict[str, str] = {}  # channels by the ids of probes
        self._unanswered: set[str] = set()
        self._unseen: set[str] = set()
        self._retry_seconds = 0.0
        #: When to call `ask_again`, on the monotonic clock.
        self.ask_again_at: float | None = None
        self.ready = False
        self.established = False  # whether it was ever ready
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        # One routing id for all: kernels request input from the routing id of a request. It is new
        # for each object: replies to clients from before the process was saved are dropped.
        name = b"sing-" + secrets.token_hex(8).encode()
        for channel in CHANNELS:
            sock = context.socket(zmq.SUB if channel == "iopub" else zmq.DEALER)
            self.sockets[channel] = sock
            sock.linger = 0
            # No limit, so that sending never blocks: other messages wait for this thread.
            sock.set_hwm(0)
            sock.reconnect_ivl, sock.reconnect_ivl_max = _RETRY, _RETRY_MAX
            if channel == "iopub":
                sock.subscribe(b"")
            else:
                sock.setsockopt(zmq.ROUTING_ID, name)
            sock.connect(connection.url(channel))

    def send(self, channel: str, frames: Frames | list[bytes]) -> None:
        """Send a message to the kernel, now or when it listens."""
        _send(self.sockets[channel], frames)

    def prove(self, *channels: str) -> None:
        """Send a probe on each channel; `ready` when all replies and their output have arrived."""
        self.ready = False
        self._probes = {}
        self._unanswered, self._unseen = set(channels), set(channels)
        self._retry_seconds = _UNANSWERED
        self.ask_again()

    def ask_again(self) -> None:
        """Repeat probes without a reply, or without output, which may have had no subscriber."""
        for channel in sorted(self._unanswered | self._unseen):
            # Not `kernel_info_request`: for its reply IPython draws from the user's random stream.
            question, frames = self._signer.make("comm_info_request")
            self._probes[question] = channel
            self.send(channel, frames)
        self.ask_again_at = time.monotonic() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, _UNANSWERED_MAX)

    def answered(self, question: str) -> None:
        """Record the reply to a probe; ignore other replies."""
        self._unanswered.discard(self._probes.get(question, ""))
        self._check()

    def seen(self, question: str) -> None:
        """Record that all output of a probe has arrived; ignore other output."""
        self._unseen.discard(self._probes.get(question, ""))
        self._check()

    def close(self) -> None:
        """Disconnect."""
        for sock in self.sockets.values():
            sock.close()

    def _check(self) -> None:
        if self.ready or self._unanswered:
            return
        if self._unseen:
            self.ask_again_at = min(self.ask_again_at or 0.0, time.monotonic() + _UNSEEN)
        else:
            self.ready = self.established = True
            self.ask_again_at = None


def _send(sock: zmq.Socket[bytes], frames: Frames | list[bytes]) -> None:
    try:
        sock.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        pass  # a client does not read, and its queue is full
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
