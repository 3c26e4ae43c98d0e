"""The kernel's connection to its session, made anew when the daemon was replaced.

A thread waits for the end of the connection, and for what the daemon wishes meanwhile. At the end
the daemon has died, and its keeper starts the next one, which knows the session; until it does,
connections wait in the backlog of the socket. So nothing is polled, and what cannot be connected to
at all is gone for good. The new connection takes the descriptor of the old one, on which the native
client rings. A kernel without a client says how many cells have ended, and all of them again over
each new connection.

Told to `Leave`, the thread gives up all that this process has of the session, and then waits for a
line at the end of a pipe, which is JSON (`Woken`). It may read that in another process, made of
images of this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kernelproxy.common.errors import (
    ControlError,
    InternalError,
    NativeError,
    ProtocolError,
    SingError,
)
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.agent_client import connect, connect_now
from kernelproxy.common.ipc.framing import encode, recv_message, send_message
from kernelproxy.common.protocol import (
    Attach,
    Attached,
    Bell,
    Carried,
    CellAsked,
    CellsEnded,
    Error,
    Leave,
    Left,
    Listen,
    Stay,
    Wish,
)
from kernelproxy.kernel.activation import state
from kernelproxy.kernel.activation.state import Woken

#: Before it answers, the next daemon imports what it needs and ends the workers of the last one,
#: for which it waits up to 30 s; on a machine that is short of everything, both take their time.
RECONNECT_SECONDS_MAX = 120.0
#: A thread that waits for the device or the daemon is waited for; else the process is not saved.
LEAVE_SECONDS_MAX = 10.0
_LINE_BYTES_MAX = 1 << 16


class Member(Protocol):
    """Who has a session's memory; as `NativeClient`."""

    def leave(self, seconds: float) -> None:
        """Give it up, and the bell."""

    def rejoin(self, fds: Sequence[int], bell_fd: int) -> None:
        """Have it again."""


class Link:
    """Keeps a session's connection alive from `start` on.

    Parameters
    ----------
    fd : int
        The connection; later ones are put in its place, except after an absence: see `fd`. Below 0:
        none yet, and the thread makes one.
    hello : Attach or Listen
        What joined the session.
    path : Path
        The daemon's socket.
    on_gone : callable
        Called, in the thread, if there is no daemon any more that knows the session.
    member : Member, optional
        Who rings on the connection and has the memory, if any.
    away : Absence
    """

    def __init__(
        self,
        fd: int,
        hello: Attach | Listen,
        path: Path,
        on_gone: Callable[[], object],
        member: Member | None = None,
        away: detach.Absence = detach.current,
    ) -> None:
        self._fd, self._hello, self._path, self._on_gone = fd, hello, path, on_gone
        self._member, self._absence = member, away
        self._closed = False
        self._heard = -1
        self._pipe: tuple[int, int] | None = None
        self._cells_ended = 0
        self._telling = threading.Lock()  # of the cells; while it is held, the descriptor stays
        self._thread = threading.Thread(target=self._run, name="jupyter_sing link", daemon=True)

    @property
    def fd(self) -> int:
        """The connection's descriptor, below 0 while there is none."""
        return self._fd

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def tell_cells(self, ended: int) -> None:
        """Tell the daemon how many cells have ended, of a kernel without a client; never waits."""
        self._cells_ended = ended
        self._tell_cells()

    def _tell_cells(self) -> None:
        with self._telling:
            if self._fd < 0 or self._closed or not self._cells_ended:
                return  # said when there is a connection
            # If it is lost, the next one says the same and more.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as sock:
                sock.send(encode(CellsEnded(self._cells_ended)), socket.MSG_DONTWAIT)

    def tell_asked(self) -> None:
        """Tell the daemon that another cell was asked for while one runs; never waits."""
        with self._telling:
            if self._fd < 0 or self._closed:
                return  # it is away, and comes back before anything else
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as sock:
                sock.send(encode(CellAsked()), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the connection, and watch no more; its descriptor may be closed then."""
        self._closed = True
        with contextlib.suppress(OSError):
            if self._pipe is not None:
                os.write(self._pipe[1], b"\n")
            with socket.socket(fileno=os.dup(self._fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def end(self) -> None:
        """Close this and its descriptor."""
        self.close()
        self._drop_connection()

    def _drop_connection(self) -> None:
        with self._telling:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def disown(self) -> None:
        """Called in a forked child: its copy of the connection must not keep the session alive.

        The number stays taken, so that nothing of the child's can be mistaken for the connection.
        """
        self._closed, self._telling = True, threading.Lock()  # perhaps held by a thread of then
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (self._fd, self._heard):
            if fd >= 0:
                os.dup2(null, fd, inheritable=False)
        os.close(null)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the user's
        problem = "The jupyter_sing daemon of this kernel is gone: restart the kernel."
        try:
            if self._fd < 0:
                self._connect()
            while not self._closed:
                woken = self._wait()
                if not self._closed:
                    self._return(woken)
        except (SingError, OSError) as error:
            problem = str(error)  # whoever uses the device says it, too
        finally:
            self._drop_pipe()
            if not self._closed:
                self._on_gone()
                self._absence.end(detach.Return(problem=problem))

    def _wait(self) -> Woken | None:
        """Hear the daemon until the end of the connection, or of the absence that it asked for."""
        with socket.socket(fileno=os.dup(self._fd)) as sock:
            self._heard = sock.fileno()
            try:
                self._hear(sock)
            except (OSError, ProtocolError):
                return None
            finally:
                self._heard = -1
        return self._await_wake()

    def _hear(self, sock: socket.socket) -> None:
        """Do what the daemon asks for, until this process has left."""
        while True:
            message, fds = recv_message(sock)
            for fd in fds:
                os.close(fd)
            if isinstance(message, Wish):
                self._pass_on(message)
            elif isinstance(message, Stay):
                self._absence.end(detach.Return())
            elif isinstance(message, Leave) and self._leave(sock):
                return

    def _pass_on(self, wish: Wish) -> None:
        """Have a wish carried out, or say why it is not."""
        if state.on_wish is not None:
            state.on_wish(wish)
            return
        if wish.withdrawn:
            return
        why = "It is a program, not a notebook: only notebooks have checkpoints."
        with connect(start=False, path=self._path) as control:
            report = Carried(self._hello.session, wish.verb, wish.name, why)
            control.call(report, RECONNECT_SECONDS_MAX)

    def _return(self, woken: Woken | None) -> None:
        """Join again after an absence, or the next daemon."""
        self._drop_pipe()
        if woken is not None and woken.restored:
            self._hello = replace(self._hello, session=woken.session)
            state.restored(woken)
        self._connect()
        self._absence.end(detach.Return(restored=woken is not None and woken.restored))

    def _connect(self) -> None:
        """Join the session again.

        Raises
        ------
        SingError, OSError
            If there is no daemon, or it does not know the session.
        """
        while True:
            with connect_now(start=False, path=self._path) as control:
                try:
                    reply, fds = control.call_with_fds(self._hello, RECONNECT_SECONDS_MAX)
                except ControlError as error:
                    if error.reason != "no-daemon":
                        raise
                    continue  # this one has died, too, and there may be another one
                try:
                    with control.detach() as sock:
                        self._adopt(sock, fds)
                        if isinstance(reply, Attached):
                            # Whatever was rung in between was heard by nobody.
                            send_message(sock, Bell())
                    self._tell_cells()
                finally:
                    for fd in fds:
                        os.close(fd)
                return

    def _adopt(self, sock: socket.socket, fds: Sequence[int]) -> None:
        """Take a new connection, and memory if there is none."""
        if self._fd >= 0:
            os.dup2(sock.fileno(), self._fd, inheritable=False)
            return
        if self._member is not None and len(fds) != 4:
            raise NativeError("The daemon gave an unexpected answer.")
        fd = os.dup(sock.fileno())
        try:
            if self._member is not None:
                self._member.rejoin(fds, fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    # Absence.

    def _leave(self, sock: socket.socket) -> bool:
        """Give up what this process has of the session, and say so; return whether it was done."""
        try:
            self._absence.begin(LEAVE_SECONDS_MAX)
        except ControlError as error:
            send_message(sock, Error(error.message, error.reason))
            return False
        try:
            if self._member is not None:
                self._member.leave(LEAVE_SECONDS_MAX)
        except NativeError as error:
            self._absence.end(detach.Return())
            send_message(sock, Error(f"{error}.", "busy"))
            return False
        self._drop_connection()
        self._pipe = os.pipe()
        send_message(sock, Left(self._pipe[1]))
        return True

    def _await_wake(self) -> Woken | None:
        """Wait for the line that ends the absence; None if this is closed meanwhile."""
        if self._pipe is None:
            raise InternalError("a kernel that has not left its session waits to be woken")
        text, woken = b"", None
        while woken is None and not self._closed:
            text += os.read(self._pipe[0], _LINE_BYTES_MAX)
            while woken is None and b"\n" in text:
                line, text = text.split(b"\n", 1)
                woken = Woken.parse(line)
        return woken

    def _drop_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for fd in pipe or ():
            os.close(fd)
