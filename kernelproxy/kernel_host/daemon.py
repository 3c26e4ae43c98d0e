"""The kernel host's process: which server has a kernel, when it has ended, when to exit.

Note [Last kernel]: as with the daemon (`kernelproxy.agent.api.daemon`), a process that connects
holds the start lock, shared; the kernel host exits with that lock held exclusively and no
connection pending, and keeps it until its process has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, ProtocolError, SingError
from kernelproxy.common.ipc.agent_client import credentials
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    AdoptKernel,
    AskKernel,
    CloseKernel,
    Done,
    EndKernels,
    Error,
    KernelState,
    ShutDownKernel,
    SignalKernel,
    StartKernel,
)
from kernelproxy.kernel_host import SOCKET_NAME, directory, hosted_kernel
from kernelproxy.kernel_host.hosted_kernel import HostedKernel

log = logging.getLogger(__name__)

#: How long it stays without a kernel: restarting one takes less.
LINGER_SECONDS = 5.0
_BACKLOG = 128


@dataclass
class _Kept:
    """Kernel, with the connection of its server, if it has one."""

    id: str
    kernel: HostedKernel
    keep: float
    server: socket.socket | None
    deadline: float | None = None  # it is ended then, unless a server adopts it
    notified: bool = False  # its server was notified that it has ended
    sending: threading.Lock = field(default_factory=threading.Lock)

    def state(self) -> KernelState:
        """Return its current state."""
        return KernelState(self.kernel.pid, self.kernel.session, self.kernel.poll())


class KernelHost:
    """Server for one runtime directory. A thread serves each connection; the main one the rest.

    Parameters
    ----------
    listener : socket.socket
    place : Path
        Directory of the kernel host.
    """

    def __init__(self, listener: socket.socket, place: Path) -> None:
        self._listener, self._place = listener, place
        self._kept: dict[str, _Kept] = {}
        self._starting: set[str] = set()
        self._busy = 0  # connections, and threads that end kernels
        self._lock = threading.Lock()
        self._leaving = threading.Condition(self._lock)  # notified when a server has left a kernel
        self._stopping = False
        self._quiet_since = time.monotonic()
        self._linger_seconds = LINGER_SECONDS
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # The main thread.

    def run(self) -> None:
        """Serve until there is nothing left to serve, or a signal ends it."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        # A kernel has ended. Python handlers: signals ignored here would be ignored in kernels.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        poller = select.poll()
        for fd in (self._listener.fileno(), self._woken):
            poller.register(fd, select.POLLIN)
        while not self._stopping:
            poller.poll(self._milliseconds())
            with contextlib.suppress(BlockingIOError):
                while os.read(self._woken, 4096):
                    pass
            self._accept()
            self._check()
            if self._due_to_leave() and self._leave():
                return
        for kept in list(self._kept.values()):
            kept.kernel.close()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake is pending already
            os.write(self._waker, b"\0")

    def _milliseconds(self) -> int | None:
        """Return the time until something is due; None if nothing is."""
        with self._lock:
            due = [kept.deadline for kept in self._kept.values() if kept.deadline is not None]
            if not self._kept and not self._busy:
                due.append(self._quiet_since + self._linger_seconds)
        return max(0, int((min(due) - time.monotonic()) * 1000) + 1) if due else None

    def _accept(self) -> bool:
        """Accept all pending connections; return whether there was one."""
        accepted = False
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _ = self._listener.accept()
                accepted = True
                if credentials(sock)[1] != os.getuid():
                    sock.close()
                    continue
                sock.setblocking(True)
                self._in_thread(self._converse, sock)
        return accepted

    def _in_thread(self, function: object, argument: object) -> None:
        with self._lock:
            self._busy += 1

        def run() -> None:
            try:
                function(argument)  # type: ignore[operator]
            except Exception:
                log.exception("A connection or a kernel was given up")
            finally:
                with self._lock:
                    self._busy -= 1
                    self._quiet_since = time.monotonic()
                self._wake()

        threading.Thread(target=run, daemon=True).start()

    def _check(self) -> None:
        """Find kernels that have ended, and kernels without a server whose time is over."""
        now = time.monotonic()
        for kept in list(self._kept.values()):
            code = kept.kernel.poll()
            if code is not None and not kept.notified:
                kept.notified = True
                self._notify(kept)
            with self._lock:
                over = kept.deadline is not None and (code is not None or kept.deadline <= now)
                if over:
                    self._kept.pop(kept.id, None)
            if over:
                log.info("Kernel %s, which has no server, %s", kept.id, _how(code))
                self._in_thread(_close, kept)

    def _notify(self, kept: _Kept) -> None:
        """Notify its server of a kernel's state."""
        server = kept.server
        if server is not None:
            with kept.sending, contextlib.suppress(OSError):  # it has left
                send_message(server, kept.state())

    def _due_to_leave(self) -> bool:
        with self._lock:
            waited = time.monotonic() - self._quiet_since >= self._linger_seconds
            return waited and not self._kept and not self._busy

    def _leave(self) -> bool:
        """Exit if no client connects, see Note [Last kernel]."""
        lock = os.open(self._place / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            self._quiet_since = time.monotonic()
            return False
        if self._accept():
            os.close(lock)
            return False
        (self._place / SOCKET_NAME).unlink(missing_ok=True)
        return True  # the lock is held until the process ends

    # A connection's thread.

    def _converse(self, sock: socket.socket) -> None:
        with sock:
            try:
                self._serve(sock)
            except (OSError, ProtocolError) as error:
                log.debug("A connection ended: %s", error)

    def _serve(self, sock: socket.socket) -> None:
        request, fds = recv_message(sock)
        kept = None
        try:
            match request:
                case StartKernel():
                    kept = self._start(request, fds, sock)
                case AdoptKernel():
                    kept = self._adopt(request, sock)
                case EndKernels():
                    self._end_kernels()
                    send_message(sock, Done())
                    return
                case _:
                    text = f"{request.wire_kind} is no request."
                    send_message(sock, Error(text, "bad-request"))
                    return
        except (SingError, OSError) as error:
            send_message(sock, Error(str(error), getattr(error, "reason", "failed")))
            return
        except Exception as error:
            log.exception("%s failed", request.wire_kind)
            text = f"internal error: {type(error).__name__}: {error}"
            send_message(sock, Error(text, "failed"))
            return
        finally:
            for fd in fds:
                os.close(fd)
        try:
            self._answer(kept)
            while self._obey(kept, sock):
                pass
        finally:
            self._left(kept)

    def _start(self, request: StartKernel, fds: Sequence[int], sock: socket.socket) -> _Kept:
        if len(fds) != 2:
            raise ControlError("A kernel needs two outlets.", "bad-request")
        with self._lock:
            old = self._kept.get(request.kernel_id)
            if request.kernel_id in self._starting or (old is not None and old.deadline is None):
                raise ControlError(f"Kernel {request.kernel_id} runs already.", "has-server")
            self._kept.pop(request.kernel_id, None)
            self._starting.add(request.kernel_id)
        try:
            if old is not None:
                log.info("Kernel %s is started anew", old.id)
                old.kernel.close()
            kept = _Kept(request.kernel_id, hosted_kernel.start(request, fds), request.keep, sock)
            with self._lock:
                self._kept[kept.id] = kept
        finally:
            with self._lock:
                self._starting.discard(request.kernel_id)
        self._wake()  # it may have ended already
        return kept

    def _adopt(self, request: AdoptKernel, sock: socket.socket) -> _Kept:
        def waits() -> bool:
            kept = self._kept.get(request.kernel_id)
            return kept is not None and kept.deadline is None

        with self._lock:
            self._leaving.wait_for(lambda: not waits(), request.wait)
            kept = self._kept.get(request.kernel_id)
            if kept is None or kept.kernel.poll() is not None:  # or it has just ended
                raise ControlError(f"There is no kernel {request.kernel_id}.", "unknown-kernel")
            if kept.deadline is None:
                raise ControlError(f"Kernel {kept.id} has a server.", "has-server")
            kept.server, kept.keep, kept.deadline = sock, request.keep, None
        log.info("Kernel %s has a server again", kept.id)
        return kept

    def _answer(self, kept: _Kept) -> None:
        with kept.sending:
            assert kept.server is not None
            send_message(kept.server, kept.state())

    def _obey(self, kept: _Kept, sock: socket.socket) -> bool:
        """Carry out the server's next command; return whether more may follow."""
        order, fds = recv_message(sock)
        for fd in fds:
            os.close(fd)
        match order:
            case AskKernel():
                self._answer(kept)
            case SignalKernel(number=number):
                kept.kernel.signal(number)
            case ShutDownKernel():
                kept.kernel.shut_down()
            case CloseKernel():
                kept.notified = True
                kept.kernel.close()
                with self._lock:
                    self._kept.pop(kept.id, None)
                self._answer(kept)
                return False
            case _:
                raise ProtocolError(f"{order.wire_kind} is no order.")
        # A kernel without a process may have ended by this: there is no signal of it.
        self._wake()
        return True

    def _left(self, kept: _Kept) -> None:
        """Handle the end of a kernel's connection, for any reason."""
        with self._lock:
            kept.server = None
            if self._kept.get(kept.id) is not kept:
                return
            kept.deadline = time.monotonic() + max(0.0, kept.keep)
            self._leaving.notify_all()
        log.info("Kernel %s has no server", kept.id)
        self._wake()

    def _end_kernels(self) -> None:
        """End the kernels that have no server."""
        with self._lock:
            ending = [kept for kept in self._kept.values() if kept.deadline is not None]
            for kept in ending:
                del self._kept[kept.id]
            self._linger_seconds = 0.0
        for kept in ending:
            log.info("Kernel %s, which has no server, is ended", kept.id)
            kept.kernel.close()


def _close(kept: _Kept) -> None:
    kept.kernel.close()


def _how(code: int | None) -> str:
    return "is ended: that was too long" if code is None else f"has ended ({code})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kernel host; ``python -m kernelproxy.kernel_host``."""
    parser = argparse.ArgumentParser(prog="python -m kernelproxy.kernel_host", description=__doc__)
    parser.add_argument("--ready-fd", type=int, required=True, help=argparse.SUPPRESS)
    ready_fd = parser.parse_args(arguments).ready_fd
    if os.fork() != 0:
        os._exit(0)  # the starter waits for this process; the child becomes a daemon
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    os.chdir("/")
    outcome, host = "ready", None
    try:
        place = directory()
        host = KernelHost(_listen(place), place)
    except (SingError, OSError) as error:
        outcome = str(error)
    with contextlib.suppress(BrokenPipeError):  # the starter has timed out
        os.write(ready_fd, f"{outcome}\n".encode())
    os.close(ready_fd)
    if host is None:
        return 1
    host.run()
    sys.stderr.flush()
    # Threads of connections may still wait for servers.
    os._exit(0)


def _listen(place: Path) -> socket.socket:
    """Bind the socket; our starter holds the start lock, so an existing socket is stale."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = place / SOCKET_NAME
    path.unlink(missing_ok=True)
    with paths.short_path(path) as name:
        listener.bind(name)
    path.chmod(0o600)
    listener.setblocking(False)
    listener.listen(_BACKLOG)
    return listener
