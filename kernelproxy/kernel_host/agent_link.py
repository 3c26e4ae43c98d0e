"""Connection of a process manager to the agent: its commands, their answers, and requests to it.

If the agent dies, the connection is made to the next one, as kernels do
(`kernelproxy.kernel.activation.agent_connection`). A command in progress is completed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Protocol

from kernelproxy.common import paths, protocol
from kernelproxy.common.errors import ControlError, ProtocolError, Reason, SingError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Message

#: As for kernels: time for the next agent to reply.
RECONNECT_SECONDS_MAX = 120.0

logger = logging.getLogger(__name__)


class CommandHandler(Protocol):
    """Carries out the agent's commands, in the thread of the connection."""

    session: str

    def carry_out(self, order: Message) -> Message:
        """Carry out a command, and return the answer.

        Raises
        ------
        SingError, OSError
            If that fails.
        """

    def unattended(self) -> None:
        """Let the kernel continue without the agent, which may have died at any point."""

    def abandoned(self, why: str) -> None:
        """Handle that no agent knows the session."""


class AgentLink:
    """Connection to one agent after the other, in a thread, from `start` to `disconnect`.

    Its lock guards the connection, and what is sent on it: no notification comes between a command
    and its answer. Commands are carried out without the lock.

    Parameters
    ----------
    path : str, Path or None
        Socket of the agent; None: the one that the environment names.
    handler : CommandHandler
    """

    def __init__(self, path: str | Path | None, handler: CommandHandler) -> None:
        self._path = paths.socket_path() if path is None else Path(path)
        self._handler = handler
        self._lock = threading.Lock()
        self._connecting: Control | None = None
        self._sock: socket.socket | None = None
        self._obeying = self._closed = False
        self._waited_for = False  # a request needs a process, and
        self._unreported = False  # the agent was not notified of it
        self._thread = threading.Thread(
            target=self._run, name="jupyter_sing agent link", daemon=True
        )

    @property
    def closed(self) -> bool:
        """True from `disconnect` on."""
        return self._closed

    def start(self) -> None:
        """Connect, and carry out commands."""
        self._thread.start()

    def disconnect(self) -> None:
        """End the connection for good; a command in progress continues."""
        with self._lock:
            self._closed = True
            if self._connecting is not None:
                self._connecting.abort()
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the end of the thread, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def request_process(self) -> None:
        """Record that a request waits for a process, and notify the agent. Thread-safe."""
        with self._lock:
            self._waited_for = self._unreported = True
            self._notify_agent()

    def withdraw_request(self) -> None:
        """Record that no request waits for a process. Called while a command is carried out."""
        with self._lock:
            self._waited_for = self._unreported = False

    def _notify_agent(self) -> None:
        """Notify the agent of a waiting request; not before the reply to its current command."""
        if self._unreported and not self._obeying and self._sock is not None:
            with contextlib.suppress(OSError):  # the next agent is notified
                send_message(self._sock, protocol.Knock())
                self._unreported = False

    def _run(self) -> None:
        try:
            while not self._closed:
                self._serve_agent()
        except ControlError as error:
            if not self._closed:
                self._handler.abandoned(str(error))

    def _serve_agent(self) -> None:
        """Connect to the agent, and carry out its commands until the connection ends.

        Raises
        ------
        ControlError
            If no running agent knows the session.
        """
        with connect(start=False, path=self._path) as control:
            with self._lock:
                if self._closed:
                    return
                self._connecting = control
            try:
                hello = protocol.Tend(self._handler.session)
                control.expect(protocol.Done, hello, RECONNECT_SECONDS_MAX)
            except ControlError as error:
                if error.reason == "no-daemon":
                    return  # it has died; there may be another one
                raise
            finally:
                with self._lock:
                    self._connecting = None
            sock = control.detach()
        with sock:
            with self._lock:
                if self._closed:
                    return
                self._sock, self._unreported = sock, self._waited_for
                self._notify_agent()
            try:
                while True:
                    self._obey(sock)
            except (OSError, ProtocolError):
                pass  # it has died
            finally:
                with self._lock:
                    self._sock = None
        self._handler.unattended()

    def _obey(self, sock: socket.socket) -> None:
        """Wait for a command, and carry it out."""
        order, fds = recv_message(sock)
        for fd in fds:
            os.close(fd)
        with self._lock:
            self._obeying = True
        answer: Message
        try:
            answer = self._handler.carry_out(order)
        except (SingError, OSError) as error:
            reason: Reason = "busy" if isinstance(order, protocol.HoldRequests) else "failed"
            answer = protocol.Error(str(error), reason)
        except Exception as error:
            logger.exception("jupyter_sing: %s was not carried out", order.wire_kind)
            answer = protocol.Error(f"internal error: {type(error).__name__}: {error}", "failed")
        with self._lock:
            self._obeying = False
            send_message(sock, answer)
            self._notify_agent()
