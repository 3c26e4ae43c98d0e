"""Kernel double that listens on its ports, does what a test asks, and records its requests."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

import zmq
from jupyter_client.session import Session

from kernelproxy.zmq_proxy.connection import Connection

SECONDS_MAX = 60.0


class FakeKernel:
    """Answers requests in order, in one thread, until it is closed.

    Its code is one word: ``input`` requests input, ``stop`` waits for `go`, and so does ``last``,
    after which it answers no further requests. Any other word is printed.

    Parameters
    ----------
    connection : Connection
    name : str
        Prefix of all output.
    deaf : int
        Number of requests that it ignores first, as if they had another key.
    mute : int
        Number of requests whose output is dropped, as before a subscription has arrived.
    """

    def __init__(
        self, connection: Connection, name: str = "", *, deaf: int = 0, mute: int = 0
    ) -> None:
        self.asked: list[str] = []  # codes, and types of other requests
        self.stopped, self.go = threading.Event(), threading.Event()
        #: Cleared: replies are sent, but the output that belongs to them is not yet sent.
        self.speak = threading.Event()
        self.speak.set()
        self._name, self._deaf, self._mute = name, deaf, mute
        self._session = Session(key=connection.key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = {}
        for channel in connection.ports:
            sock = self._context.socket(zmq.PUB if channel == "iopub" else zmq.ROUTER)
            sock.linger = 0
            sock.bind(connection.url(channel))
            self._sockets[channel] = sock
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End, also in the middle of a request."""
        self._end.set()
        self.go.set()
        self.speak.set()
        self._thread.join()
        for sock in self._sockets.values():
            sock.close()
        self._context.term()

    def _run(self) -> None:
        channels = {self._sockets[channel]: channel for channel in ("hb", "control", "shell")}
        poller = zmq.Poller()
        for sock in channels:
            poller.register(sock, zmq.POLLIN)
        while not self._end.is_set():
            for sock, _ in poller.poll(10):
                if channels[sock] == "hb":
                    sock.send_multipart(sock.recv_multipart())
                else:
                    self._answer(channels[sock])

    def _answer(self, channel: str) -> None:
        sock = self._sockets[channel]
        try:
            idents, message = self._session.recv(sock, mode=0)
        except ValueError:
            return  # wrong signature, or a duplicate
        assert idents is not None
        assert message is not None
        kind, code = message["msg_type"], message["content"].get("code", "")
        if self._deaf:
            self._deaf -= 1
            return
        if kind not in ("kernel_info_request", "comm_info_request"):
            self.asked.append(code or kind)
        mute, self._mute = self._mute > 0, max(0, self._mute - 1)
        said: list[tuple[str, dict[str, Any]]] = [("status", {"execution_state": "busy"})]
        if code == "last":
            self._deaf = sys.maxsize
        if code in ("stop", "last"):
            self._publish(said.pop(), message)
            self.stopped.set()
            self.go.wait(SECONDS_MAX)
        if code == "input":
            code = self._ask(idents, message)
        if code:
            said.append(("stream", {"name": "stdout", "text": f"{self._name}{code}"}))
        said.append(("status", {"execution_state": "idle"}))
        if self._end.is_set():
            return
        if kind not in ("comm_msg", "unknown_request"):
            reply, buffers = kind.replace("_request", "_reply"), message["buffers"]
            content = {"status": "ok", "by": self._name}
            self._session.send(sock, reply, content, message, idents, list(map(bytes, buffers)))
        self.speak.wait(SECONDS_MAX)
        for each in said if not mute else ():
            self._publish(each, message)

    def _publish(self, said: tuple[str, dict[str, Any]], parent: dict[str, Any]) -> None:
        topic = b"kernel." + said[0].encode()
        self._session.send(self._sockets["iopub"], *said, parent, topic)

    def _ask(self, idents: list[bytes], parent: dict[str, Any]) -> str:
        stdin = self._sockets["stdin"]
        self._session.send(stdin, "input_request", {"prompt": ""}, parent, idents)
        while not stdin.poll(10):
            if self._end.is_set():
                return ""
        _, answer = self._session.recv(stdin, mode=0)
        assert answer is not None
        return str(answer["content"]["value"])


class Client:
    """Client of a kernel, like a front end.

    Parameters
    ----------
    connection : Connection
    key : bytes, optional
        If other than the kernel's.
    """

    def __init__(self, connection: Connection, key: bytes | None = None) -> None:
        self._session = Session(key=connection.key if key is None else key)
        self._readers = Session(key=connection.key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = {}
        for channel in connection.ports:
            kinds = {"iopub": zmq.SUB, "hb": zmq.REQ}
            sock = self._context.socket(kinds.get(channel, zmq.DEALER))
            sock.linger = 0
            if channel == "iopub":
                sock.set_hwm(0)
                sock.subscribe(b"")
            elif channel != "hb":
                sock.setsockopt(zmq.ROUTING_ID, self._session.bsession)
            sock.connect(connection.url(channel))
            self._sockets[channel] = sock
        self._early: deque[dict[str, Any]] = deque()

    def close(self) -> None:
        """Disconnect."""
        for sock in self._sockets.values():
            sock.close()
        self._context.term()

    def ask(
        self, kind: str, channel: str = "shell", buffers: tuple[bytes, ...] = (), **content: Any
    ) -> str:
        """Send a request; return its id."""
        subshell = content.pop("subshell", None)
        message = self._session.msg(kind, content)
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self._session.send(self._sockets[channel], message, buffers=list(buffers))
        return str(message["header"]["msg_id"])

    def run(self, code: str) -> str:
        """Send an execute request; return its id."""
        return self.ask("execute_request", code=code)

    def hear(self, channel: str = "shell") -> dict[str, Any]:
        """Receive the next message."""
        sock = self._sockets[channel]
        if not sock.poll(round(1000 * SECONDS_MAX)):
            raise TimeoutError(f"nothing came on {channel}")
        message = self._readers.recv(sock, mode=0)[1]
        assert message is not None
        return message

    def hears(self, channel: str) -> bool:
        """True if a message has arrived."""
        return bool(self._sockets[channel].poll(0))

    def give(self, value: str) -> None:
        """Answer an input request."""
        self._session.send(self._sockets["stdin"], "input_reply", {"value": value})

    def beats(self) -> bool:
        """True if a heartbeat is answered."""
        sock = self._sockets["hb"]
        sock.send(b"ping")
        return bool(sock.poll(round(1000 * SECONDS_MAX))) and sock.recv() == b"ping"

    def subscribed(self) -> None:
        """Wait until output arrives at this client."""
        assert self.hear("iopub")["msg_type"] == "iopub_welcome"

    def begun(self, request: str) -> None:
        """Wait until a request is being handled, as far as the proxies on the way know."""
        while True:
            message = self.hear("iopub")
            state = message["content"].get("execution_state")
            if state == "busy" and message["parent_header"]["msg_id"] == request:
                return

    def output(self, until: str) -> list[str]:
        """Return what is printed until a request has been handled."""
        printed = []
        while True:
            message = self.hear("iopub")
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            elif (
                message["content"].get("execution_state") == "idle"
                and message["parent_header"]["msg_id"] == until
            ):
                return printed
