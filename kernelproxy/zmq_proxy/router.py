"""Handling of messages and commands in the ZMQ proxy; see `kernelproxy.zmq_proxy.proxy`.

Everything runs in one thread, and nothing blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kernelproxy.common.errors import ProcessError
from kernelproxy.zmq_proxy.connection import Connection
from kernelproxy.zmq_proxy.messages import (
    Frames,
    PendingRequest,
    Signer,
    Unanswered,
    is_welcome,
    parent_of,
    state_of,
)
from kernelproxy.zmq_proxy.sockets import Back, Front

_REQUEST_CHANNELS = ("shell", "control")
#: Maximum number of messages forwarded from one socket before the others get their turn.
_BURST = 200

Handler = Callable[[Frames], None]


@dataclass(frozen=True)
class Awaited:
    """Condition that completes a command, and its error at the deadline."""

    until: Callable[[], bool]
    otherwise: Callable[[], ProcessError]
    deadline: float


class Exchange:
    """Forwards messages between clients and the process of a kernel.

    The commands are those of `ZmqProxy`; lengthy ones return what they wait for.

    Parameters
    ----------
    connection : Connection
        Addresses at which clients expect the kernel.
    on_request, on_shutdown : callable
        See `ZmqProxy`.

    Raises
    ------
    ProcessError
        If it cannot listen at these addresses.
    """

    def __init__(
        self,
        connection: Connection,
        on_request: Callable[[], object],
        on_shutdown: Callable[[], object],
    ) -> None:
        self._signer = Signer(connection)
        self._on_request, self._on_shutdown = on_request, on_shutdown
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._front = Front(self._context, connection)
        except zmq.ZMQError as error:
            self._context.term()
            raise ProcessError(
                f"a port of the kernel is in use ({error})", "unavailable"
            ) from error
        self._back: Back | None = None
        self._candidate: Back | None = None
        self._beside = False  # whether the candidate is to replace `_back`
        self._held = self._frozen = self._detached = self._requested = self._replacing = False
        self._unanswered = Unanswered()
        self._waiting: deque[PendingRequest] = deque()  # received while detached
        self._last: PendingRequest | None = (
            None  # the request that `_back` completes before it is replaced
        )

    def close(self) -> None:
        """Forward the process's last messages, such as the reply to a shutdown, and stop."""
        try:
            if self._back is not None:
                for sock, handler in self._from_kernel(self._back).items():
                    drain(sock, handler)
        finally:
            for side in (self._back, self._candidate, self._front):
                if side is not None:
                    side.close()
            self._context.term()

    # What to poll, and when.

    def key(self) -> object:
        """Return a value that changes whenever the result of `handlers` does."""
        established = self._back is not None and self._back.established
        state = (self._held, self._detached, self._requested, established)
        return self._back, self._candidate, state

    def handlers(self) -> dict[zmq.Socket[bytes], Handler]:
        """Return the handlers of all sockets. Output first: a reply may complete a request."""
        handlers: dict[zmq.Socket[bytes], Handler] = {}
        for back in filter(None, (self._back, self._candidate)):
            handlers |= self._from_kernel(back)
        front = self._front.sockets
        handlers[front["iopub"]] = self._subscribed
        handlers[front["hb"]] = self._heartbeat
        if self._back is not None:
            handlers[front["stdin"]] = self._input
        if self._detached:
            handlers[front["control"]] = lambda frames: self._on_detached("control", frames)
            if not self._requested:
                handlers[front["shell"]] = lambda frames: self._on_detached("shell", frames)
        elif self._back is not None and self._back.established and not self._held:
            handlers[front["control"]] = lambda frames: self._request("control", frames)
            handlers[front["shell"]] = lambda frames: self._request("shell", frames)
        return handlers

    def _from_kernel(self, back: Back) -> dict[zmq.Socket[bytes], Handler]:
        """Return the handlers of the messages from a process."""
        sockets = back.sockets
        return {
            sockets["iopub"]: lambda frames: self._output(back, frames),
            sockets["shell"]: lambda frames: self._reply(back, "shell", frames),
            sockets["control"]: lambda frames: self._reply(back, "control", frames),
            sockets["stdin"]: lambda frames: self._front.send("stdin", frames),
            sockets["hb"]: lambda frames: self._front.send("hb", frames),
        }

    def due(self) -> float | None:
        """Return when `check` is due without an event, in monotonic time; None: never."""
        backs = filter(None, (self._back, self._candidate))
        return min((b.ask_again_at for b in backs if b.ask_again_at is not None), default=None)

    def check(self) -> None:
        """Repeat the probes that are due."""
        for back in filter(None, (self._back, self._candidate)):
            if back.ask_again_at is not None and back.ask_again_at <= time.monotonic():
                back.ask_again()

    # Messages from clients.

    def _request(self, channel: str, frames: Frames) -> None:
        """Forward a request to the process."""
        assert self._back is not None
        if request := self._signer.request(frames):
            self._ask(self._back, PendingRequest(channel, frames, request))
        else:
            self._back.send(channel, frames)

    def _input(self, frames: Frames) -> None:
        """Forward the user's input."""
        if self._back is not None:
            self._back.send("stdin", frames)

    def _heartbeat(self, frames: Frames) -> None:
        """Forward a heartbeat to the process, or answer it for one that cannot."""
        if self._back is None or self._frozen or self._held:
            self._front.send("hb", frames)
        else:
            self._back.send("hb", frames)

    def _subscribed(self, frames: Frames) -> None:
        """Welcome a client, which now gets all output. (Newer kernels do so, too.)"""
        event = frames[0].bytes
        if event[:1] == b"\x01":
            topic = event[1:]
            about = {"subscription": topic.decode(errors="replace")}
            message = self._signer.make("iopub_welcome", about)[1]
            self._front.send("iopub", [topic, *message] if topic else message)

    def _on_detached(self, channel: str, frames: Frames) -> None:
        """Handle a request while there is no process."""
        request = self._signer.request(frames)
        match request.type if request else "":
            case "":
                return  # a kernel would ignore it, too
            case "usage_request":
                return  # repeated every few seconds, and no client waits for the reply
            case "interrupt_request":
                self._answer(channel, "interrupt_reply", frames)  # nothing runs
            case "shutdown_request":
                self._answer(channel, "shutdown_reply", frames)
                self._on_shutdown()
            case _:
                assert request is not None
                self._waiting.append(PendingRequest(channel, frames, request))
                if not self._requested:
                    self._requested = True
                    self._on_request()

    def _answer(self, channel: str, kind: str, request: Frames) -> None:
        """Reply in place of a kernel."""
        _, reply = self._signer.make(kind, {"status": "ok", "restart": False}, request)
        self._front.send(channel, reply)

    # Messages from a process.

    def _reply(self, back: Back, channel: str, frames: Frames) -> None:
        """Forward a reply."""
        request_id = parent_of(frames)
        if self._signer.is_own(request_id):
            back.answered(request_id)
        elif back is self._back and not (self._replacing and self._last and self._last.replied):
            self._unanswered.replied(request_id)
            self._front.send(channel, frames)

    def _output(self, back: Back, frames: Frames) -> None:
        """Forward the output of a process."""
        state, request_id = state_of(frames)
        if self._signer.is_own(request_id):
            if state == "idle":
                back.seen(request_id)
            return
        if is_welcome(frames):
            return
        if back is self._candidate:
            if not self._beside:
                self._front.send("iopub", frames)
            return
        if self._replacing and self._last and self._last.idle:
            return  # output of requests that the next process will get again
        if state:
            self._unanswered.status(request_id, state)
        self._front.send("iopub", frames)

    # Commands.

    def connect(self, connection: Connection) -> None:
        """See `ZmqProxy`, for all commands."""
        self._back = Back(self._context, connection, self._signer)
        self._back.prove(*_REQUEST_CHANNELS)

    def pause(self) -> None:
        self._held = True
        self._last = self._unanswered.executing()

    def hold(self, deadline: float) -> Awaited:
        back = self._attached()
        self._held = True
        # The shell is probed only if a request may be left there: output of threads belongs to the
        # last cell requested on it, and a probe would replace that cell.
        quiet = back.established and not self._unanswered.any("shell")
        back.prove(*(("control",) if quiet else _REQUEST_CHANNELS))

        def until() -> bool:
            if back.ready:
                self._unanswered.settled()
            return back.ready and not self._unanswered.any("shell")

        def otherwise() -> ProcessError:
            self._held, back.ask_again_at = False, None
            return ProcessError("the kernel is busy", "timeout")

        return Awaited(until, otherwise, deadline)

    def let_through(self) -> None:
        back = self._attached()
        while self._waiting:
            self._ask(back, self._waiting.popleft())
        self._held, self._last = False, None

    def freeze(self, frozen: bool) -> None:
        self._frozen = frozen

    def detach(self) -> None:
        if self._back is not None:
            self._back.close()
            self._back = None
        self._unanswered.take()
        self._detached, self._requested = True, False

    def listen(self) -> None:
        self._requested = False

    def prepare(self, connection: Connection, deadline: float, beside: bool) -> Awaited:
        self.discard()
        candidate = self._candidate = Back(self._context, connection, self._signer)
        self._beside = beside
        candidate.prove(*_REQUEST_CHANNELS)

        def otherwise() -> ProcessError:
            self.discard()
            return ProcessError("the restored process does not answer", "restore")

        return Awaited(lambda: candidate.ready, otherwise, deadline)

    def adopt(self) -> None:
        self._back, self._candidate = self._prepared(), None
        self._detached, self._held = False, True

    def replace(self, deadline: float) -> Awaited:
        old, new, last = self._attached(), self._prepared(), self._last
        self._held = self._replacing = True

        def until() -> bool:
            if last is not None and self._unanswered.holds(last):
                return False
            self._back, self._candidate = new, None
            old.close()
            for entry in self._unanswered.take():
                self._ask(new, entry)
            self._held, self._replacing, self._last = False, False, None
            return True

        def otherwise() -> ProcessError:
            self._replacing = False
            return ProcessError("the kernel does not end what it executes", "timeout")

        return Awaited(until, otherwise, deadline)

    def discard(self) -> None:
        if self._candidate is not None:
            self._candidate.close()
            self._candidate = None

    def _ask(self, back: Back, entry: PendingRequest) -> None:
        """Send a request to a process, and record it as unanswered."""
        entry.started = entry.replied = entry.idle = False
        self._unanswered.add(entry)
        back.send(entry.channel, entry.frames)

    def _attached(self) -> Back:
        if self._back is None:
            raise ProcessError("the kernel has no process", "unavailable")
        return self._back

    def _prepared(self) -> Back:
        if self._candidate is None or not self._candidate.established:
            raise ProcessError("there is no process to take the kernel's place", "unavailable")
        return self._candidate


def drain(sock: zmq.Socket[bytes], handler: Handler) -> None:
    """Handle the messages that have arrived at a socket, up to a limit."""
    for _ in range(_BURST):
        if sock.closed:
            return
        try:
            frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        handler(frames)
