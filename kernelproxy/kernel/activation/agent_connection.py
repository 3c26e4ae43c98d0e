"""Connection of the kernel to its session, renewed when the daemon was replaced.

A thread waits for the end of the connection, and meanwhile for the daemon's requests. The end means
that the daemon has died. Its supervisor starts the next one, which knows the session; until then,
connections wait in the backlog of the socket. So nothing is polled, and if connecting fails, the
daemon is gone for good. The new connection takes the descriptor of the old one, on which the native
client rings. A kernel without a client reports how many cells have ended, and repeats the total
over each new connection.

On `Leave`, the thread releases everything that this process has of the session. Then it waits for a
line of JSON (`Woken`) from a pipe. It may read that line in another process, restored from images
of this one.
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
    KernelRequest,
    Leave,
    Left,
    Listen,
    Stay,
)
from kernelproxy.kernel.activation import state
from kernelproxy.kernel.activation.state import Woken

#: Before it answers, the next daemon imports its modules and ends the workers of the previous one,
#: for which it waits up to 30 s; on an overloaded machine both take long.
RECONNECT_SECONDS_MAX = 120.0
#: Time for threads that wait for the device or the daemon; after it, the process is not saved.
LEAVE_SECONDS_MAX = 10.0
_LINE_BYTES_MAX = 1 << 16


class DetachableClient(Protocol):
    """Holder of a session's memory; as `NativeClient`."""

    def leave(self, seconds: float) -> None:
        """Release the memory and the bell."""

    def rejoin(self, fds: Sequence[int], bell_fd: int) -> None:
        """Take the memory again."""


class Link:
    """Keeps a session's connection alive from `start` on.

    Parameters
    ----------
    fd : int
        The connection. A later one replaces it under the same number, except after an absence:
        see `fd`. Below 0: none yet, and the thread connects.
        none yet, and the thread makes one.
    hello : Attach or Listen
        Request that joins the session.
    path : Path
        The daemon's socket.
    on_gone : callable
        Called in the thread, if no running daemon knows the session.
    member : Member, optional
        Rings on the connection and holds the memory, if given.
    away : Absence
    """

    def __init__(
        self,
        fd: int,
        hello: Attach | Listen,
        path: Path,
        on_gone: Callable[[], object],
        member: DetachableClient | None = None,
        away: detach.Absence = detach.current,
    ) -> None:
        self._fd, self._hello, self._path, self._on_gone = fd, hello, path, on_gone
        self._member, self._absence = member, away
        self._closed = False
        self._receiving_fd = -1
        self._pipe: tuple[int, int] | None = None
        self._cells_ended = 0
        self._report_lock = threading.Lock()  # of reports; while it is held, the descriptor stays
        self._thread = threading.Thread(target=self._run, name="jupyter_sing link", daemon=True)

    @property
    def fd(self) -> int:
        """Descriptor of the connection, below 0 while there is none."""
        return self._fd

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def report_cells(self, ended: int) -> None:
        """Report how many cells have ended, for a kernel without a client; never blocks."""
        self._cells_ended = ended
        self._report_cells()

    def _report_cells(self) -> None:
        with self._report_lock:
            if self._fd < 0 or self._closed or not self._cells_ended:
                return  # sent when there is a connection
            # If it is lost, the next connection sends the current total.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as sock:
                sock.send(encode(CellsEnded(self._cells_ended)), socket.MSG_DONTWAIT)

    def report_cell_request(self) -> None:
        """Report that another cell was requested while one runs; never blocks."""
        with self._report_lock:
            if self._fd < 0 or self._closed:
                return  # detached, and reattaches before anything else
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as sock:
                sock.send(encode(CellAsked()), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the connection and the thread; afterwards the descriptor may be closed."""
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
        with self._report_lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def disown(self) -> None:
        """Called in a forked child: its copy of the connection must not keep the session alive.

        The number stays in use, so that no other file of the child is mistaken for the connection.
        """
        self._closed, self._report_lock = True, threading.Lock()  # perhaps held at the fork
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (self._fd, self._receiving_fd):
            if fd >= 0:
                os.dup2(null, fd, inheritable=False)
        os.close(null)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the user's thread
        problem = "The jupyter_sing daemon of this kernel is gone: restart the kernel."
        try:
            if self._fd < 0:
                self._connect()
            while not self._closed:
                woken = self._wait()
                if not self._closed:
                    self._return(woken)
        except (SingError, OSError) as error:
            problem = str(error)  # users of the device report it, too
        finally:
            self._drop_pipe()
            if not self._closed:
                self._on_gone()
                self._absence.end(detach.Return(problem=problem))

    def _wait(self) -> Woken | None:
        """Receive requests until the connection ends, or the absence that the daemon requested."""
        with socket.socket(fileno=os.dup(self._fd)) as sock:
            self._receiving_fd = sock.fileno()
            try:
                self._receive(sock)
            except (OSError, ProtocolError):
                return None
            finally:
                self._receiving_fd = -1
        return self._await_wake()

    def _receive(self, sock: socket.socket) -> None:
        """Carry out the daemon's requests, until this process has detached."""
        while True:
            message, fds = recv_message(sock)
            for fd in fds:
                os.close(fd)
            if isinstance(message, KernelRequest):
                self._pass_on(message)
            elif isinstance(message, Stay):
                self._absence.end(detach.Return())
            elif isinstance(message, Leave) and self._leave(sock):
                return

    def _pass_on(self, request: KernelRequest) -> None:
        """Have a request carried out, or report why it is not."""
        if state.on_request is not None:
            state.on_request(request)
            return
        if request.withdrawn:
            return
        why = "It is a program, not a notebook: only notebooks have checkpoints."
        with connect(start=False, path=self._path) as control:
            report = Carried(self._hello.session, request.verb, request.name, why)
            control.call(report, RECONNECT_SECONDS_MAX)

    def _return(self, woken: Woken | None) -> None:
        """Join again after an absence, or join the next daemon."""
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
                    continue  # this daemon has died, too; there may be another one
                try:
                    with control.detach() as sock:
                        self._adopt(sock, fds)
                        if isinstance(reply, Attached):
                            # Rings between the two connections were received by no daemon. If this
                            # one has died since its reply, the end of the connection shows that.
                            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                                send_message(sock, Bell())
                    self._report_cells()
                finally:
                    for fd in fds:
                        os.close(fd)
                return

    def _adopt(self, sock: socket.socket, fds: Sequence[int]) -> None:
        """Take a new connection, and the session's memory if this process has none."""
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
        """Release what this process has of the session, and reply; return whether it succeeded."""
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
        """Wait for the line that ends the absence; return None if this is closed meanwhile."""
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
