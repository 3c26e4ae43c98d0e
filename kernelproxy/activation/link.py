"""The kernel's connection to its session, made anew when the daemon was replaced.

A thread waits for the end of the connection, and for what the daemon wishes meanwhile. At the end
the daemon has died, and its keeper starts the
next one, which knows the session; until it does, connections wait in the backlog of the socket. So
nothing is polled, and what cannot be connected to at all is gone for good. The new connection takes
the descriptor of the old one, on which the native client rings.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kernelproxy import activation
from kernelproxy.control import connect
from kernelproxy.errors import ControlError, ProtocolError, SingError
from kernelproxy.frames import recv_message, send_message
from kernelproxy.protocol import Attach, Bell, Carried, Wish

#: Before it answers, the next daemon imports what it needs and ends the workers of the last one,
#: for which it waits up to 30 s; on a machine that is short of everything, both take their time.
RECONNECT_SECONDS_MAX = 120.0


class Link:
    """Keeps a session's connection alive from `start` on.

    Parameters
    ----------
    fd : int
        The connection. Stays the caller's; later ones are put in its place.
    attach : Attach
        What joined the session.
    path : Path
        The daemon's socket.
    on_gone : callable
        Called, in the thread, if there is no daemon any more that knows the session.
    """

    def __init__(self, fd: int, attach: Attach, path: Path, on_gone: Callable[[], object]) -> None:
        self._fd, self._attach, self._path, self._on_gone = fd, attach, path, on_gone
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jupyter_sing link", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """End the connection, and watch no more; its descriptor may be closed then."""
        self._closed = True
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the user's
        try:
            while not self._closed:
                self._wait()
                if not self._closed:
                    self._connect()
        except (SingError, OSError):
            pass  # whoever uses the device says it
        finally:
            if not self._closed:
                self._on_gone()

    def _wait(self) -> None:
        """Hear the daemon until the end of the connection."""
        with socket.socket(fileno=os.dup(self._fd)) as sock:
            try:
                while True:
                    message, fds = recv_message(sock)
                    for fd in fds:
                        os.close(fd)
                    if isinstance(message, Wish):
                        self._pass_on(message)
            except (OSError, ProtocolError):
                return

    def _pass_on(self, wish: Wish) -> None:
        """Have a wish carried out, or say why it is not."""
        if activation.on_wish is not None:
            activation.on_wish(wish)
            return
        why = "It is a program, not a notebook: only notebooks have checkpoints."
        with connect(start=False, path=self._path) as control:
            report = Carried(self._attach.session, wish.verb, wish.name, why)
            control.call(report, RECONNECT_SECONDS_MAX)

    def _connect(self) -> None:
        """Join the session again, at the next daemon.

        Raises
        ------
        SingError, OSError
            If there is none, or it does not know the session.
        """
        while True:
            with connect(start=False, path=self._path) as control:
                try:
                    _, fds = control.call_with_fds(self._attach, RECONNECT_SECONDS_MAX)
                except ControlError as error:
                    if error.reason != "no-daemon":
                        raise
                    continue  # this one has died, too, and there may be another one
                for fd in fds:  # the memory that is mapped here already
                    os.close(fd)
                with control.detach() as sock:
                    os.dup2(sock.fileno(), self._fd, inheritable=False)
                    # Whatever was rung in between was heard by nobody.
                    send_message(sock, Bell())
                return
