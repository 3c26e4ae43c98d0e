"""The two sides of a switchboard: sockets for clients, and sockets to the kernel's process."""

from __future__ import annotations

import secrets
import time

import zmq

from kernelproxy.zmq_proxy.connection import CHANNELS, Connection
from kernelproxy.zmq_proxy.messages import Frames, Signer

#: Messages that wait for a client that does not read. Kernels drop them after a thousand; what is
#: passed on comes in bursts.
_MESSAGES_MAX = 10_000
#: Milliseconds for the last words to clients, such as the reply to a shutdown; as kernels have it.
_LINGER = 1000
#: Milliseconds until it is tried again to reach a kernel that does not listen yet.
_RETRY, _RETRY_MAX = 20, 100
#: Seconds after which it is asked again: when the answer came without its output; and first and
#: at most, when none came. A restored process may have had another key when it was asked.
_UNSEEN, _UNANSWERED, _UNANSWERED_MAX = 0.05, 0.25, 30.0


class Front:
    """Listens where the clients expect the kernel.

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
                    sock.router_handover = 1  # as kernels do: clients come back by their names
                sock.bind(connection.url(channel))
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, channel: str, frames: Frames | list[bytes]) -> None:
        """Pass a message to its client, or to all; one that is gone is no error."""
        _send(self.sockets[channel], frames)

    def close(self) -> None:
        """Listen no more."""
        for sock in self.sockets.values():
            sock.close()


class Back:
    """Connections to one process of a kernel, and the proof that they work.

    It is *ready* when it has answered a question of ours, and its output for that has arrived: a
    publisher drops what nobody has subscribed to yet.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], connection: Connection, signer: Signer
    ) -> None:
        self._signer = signer
        self._asked: dict[str, str] = {}  # channels by the ids of our questions
        self._unanswered: set[str] = set()
        self._unseen: set[str] = set()
        self._patience = 0.0
        #: When to call `ask_again`, on the monotonic clock.
        self.ask_again_at: float | None = None
        self.ready = False
        self.established = False  # whether it was ever ready
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        # One name for all: kernels ask for input from the name that the request came by. It is a
        # new one each time: answers to who was there before the process was saved go to nobody.
        name = b"sing-" + secrets.token_hex(8).encode()
        for channel in CHANNELS:
            sock = context.socket(zmq.SUB if channel == "iopub" else zmq.DEALER)
            self.sockets[channel] = sock
            sock.linger = 0
            # Sending never waits: a kernel reads all at once, and others wait for this thread.
            sock.set_hwm(0)
            sock.reconnect_ivl, sock.reconnect_ivl_max = _RETRY, _RETRY_MAX
            if channel == "iopub":
                sock.subscribe(b"")
            else:
                sock.setsockopt(zmq.ROUTING_ID, name)
            sock.connect(connection.url(channel))

    def send(self, channel: str, frames: Frames | list[bytes]) -> None:
        """Pass a message to the kernel, now or when it listens."""
        _send(self.sockets[channel], frames)

    def prove(self, *channels: str) -> None:
        """Ask the kernel something on each channel; `ready` when all is answered and seen."""
        self.ready = False
        self._asked = {}
        self._unanswered, self._unseen = set(channels), set(channels)
        self._patience = _UNANSWERED
        self.ask_again()

    def ask_again(self) -> None:
        """Ask where an answer is missing, or its output, which may have been sent to nobody."""
        for channel in sorted(self._unanswered | self._unseen):
            # Not what it is: to say that, IPython takes a number out of the user's random stream.
            question, frames = self._signer.make("comm_info_request")
            self._asked[question] = channel
            self.send(channel, frames)
        self.ask_again_at = time.monotonic() + self._patience
        self._patience = min(2 * self._patience, _UNANSWERED_MAX)

    def answered(self, question: str) -> None:
        """Note that a question was answered, if it is one of these."""
        self._unanswered.discard(self._asked.get(question, ""))
        self._look()

    def seen(self, question: str) -> None:
        """Note that all output for a question has arrived, if it is one of these."""
        self._unseen.discard(self._asked.get(question, ""))
        self._look()

    def close(self) -> None:
        """Disconnect."""
        for sock in self.sockets.values():
            sock.close()

    def _look(self) -> None:
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
        pass  # a client reads nothing, and has ten thousand messages to read
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
