"""Kernel in the kernel host, as its server sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

from kernelproxy.common import fork_hygiene, paths
from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.framing import FrameDecoder, recv_message, send_message
from kernelproxy.common.protocol import (
    AdoptKernel,
    AskKernel,
    CloseKernel,
    Done,
    EndKernels,
    Error,
    KernelState,
    Message,
    ShutDownKernel,
    SignalKernel,
    StartKernel,
)
from kernelproxy.kernel_host import SOCKET_NAME, directory

#: Time for the kernel host to start a kernel, which has a limit of its own, and more.
START_SECONDS_MAX = 90.0
#: Time for it to reply, and to end a kernel, on a loaded machine.
ANSWER_SECONDS_MAX = 30.0


class RemoteKernel:
    """Server's end of the connection of one kernel. Thread-safe.

    It is a `kernelproxy.kernel_host.hosted_kernel.HostedKernel`.

    Parameters
    ----------
    sock : socket.socket
        Takes ownership.
    state : KernelState
        First message received over it.
    """

    def __init__(self, sock: socket.socket, state: KernelState) -> None:
        self._sock: socket.socket | None = sock
        self._pidfd = -1
        self._state = KernelState(0, "", None)
        self._note(state)
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        fork_hygiene.register(self)  # a forked child must not keep the connection open

    @property
    def session(self) -> str:
        """Id of the kernel's session."""
        return self._state.session

    @property
    def pid(self) -> int:
        """Process id of the kernel; 0 while it hibernates."""
        return self._state.pid

    def poll(self) -> int | None:
        """Return the exit status of the kernel; None if it has not ended. Never blocks."""
        if self._lock.acquire(blocking=False):  # else another thread receives now
            try:
                self._receive_arrived()
            finally:
                self._lock.release()
        return self._state.code

    def refresh(self) -> None:
        """Request the current state: process and session may have changed."""
        with self._lock:
            self._receive_arrived()
            if self._send(AskKernel()):
                with self._time_limit():
                    self._receive_once()

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and the processes that it has started."""
        with self._lock:
            self._send(SignalKernel(number))

    def shut_down(self) -> None:
        """Report that the kernel was asked to end."""
        with self._lock:
            self._send(ShutDownKernel())

    def close(self) -> None:
        """End the kernel, and wait until nothing is left. Idempotent."""
        with self._lock:
            if self._send(CloseKernel()):
                with self._time_limit():
                    while self._sock is not None:
                        self._receive_once()
            self._lost()

    def leave(self) -> None:
        """Let the kernel continue without a server."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
            self._forget()

    def disown(self) -> None:
        """Called in a forked child: release its copy of the connection."""
        if self._sock is not None:
            fork_hygiene.redirect_to_null([self._sock.fileno()])

    def _send(self, message: Message) -> bool:
        """Send a message; return whether the kernel host is connected."""
        if self._sock is not None:
            try:
                send_message(self._sock, message)
            except OSError:
                self._lost()
        return self._sock is not None

    def _receive_arrived(self) -> None:
        """Process the messages that have arrived, without blocking."""
        with contextlib.suppress(BlockingIOError):
            while self._sock is not None:
                self._receive_once(socket.MSG_DONTWAIT)

    def _receive_once(self, flags: int = 0) -> None:
        """Receive once, and process complete messages.

        Raises
        ------
        BlockingIOError
            With ``MSG_DONTWAIT``, if nothing has arrived.
        """
        if self._sock is None:
            return
        try:
            data = self._sock.recv(1 << 16, flags)
            self._decoder.feed(data)
            while found := self._decoder.next_message():
                if isinstance(found[0], KernelState):
                    self._note(found[0])
        except BlockingIOError:
            raise
        except (OSError, ProtocolError):  # or a timeout
            data = b""
        if not data:
            self._lost()

    def _note(self, state: KernelState) -> None:
        """Store the kernel's state, and open a pidfd of a new process."""
        if state.pid != self._state.pid or state.code is not None:
            self._forget()
            if state.pid and state.code is None:
                with contextlib.suppress(OSError):  # it has ended already
                    self._pidfd = os.pidfd_open(state.pid)
        self._state = state

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _lost(self) -> None:
        """Handle the end of the connection, and with it of the kernel: it was closed, or the kernel
        host died or does not reply any more.
        """
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._state.code is None:
            if self._pidfd >= 0:  # it may still run, and the next kernel needs its ports
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._note(KernelState(0, self._state.session, 1))

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Set a time limit on receiving."""
        sock = self._sock
        assert sock is not None
        sock.settimeout(ANSWER_SECONDS_MAX)
        try:
            yield
        finally:
            if self._sock is not None:
                sock.settimeout(None)


def start(request: StartKernel, outlets: Sequence[int]) -> RemoteKernel:
    """Let the kernel host start a kernel; it is started itself if needed.

    Parameters
    ----------
    request : StartKernel
    outlets : sequence of int
        Descriptors of the kernel's standard output and error.

    Raises
    ------
    ControlError
        ``no-daemon``, ``timeout`` or ``broken``: there is no kernel host, or none that understands
        the request; else it could not start the kernel.
    """
    return _request(_connect(start=True), request, outlets, START_SECONDS_MAX)


def adopt(request: AdoptKernel) -> RemoteKernel:
    """Adopt a kernel whose server has left.

    Raises
    ------
    ControlError
        ``no-daemon`` or ``unknown-kernel``: it has ended; ``has-server``: its server is connected;
        ``timeout`` or ``broken``: its state is unknown.
    """
    return _request(_connect(start=False), request, (), ANSWER_SECONDS_MAX)


def end_kernels() -> bool:
    """End all kernels that have no server; return whether a kernel host was running.

    Raises
    ------
    ControlError
        If the kernel host does not reply.
    """
    try:
        sock = _connect(start=False)
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        return False
    with sock:
        _exchange(sock, EndKernels(), (), START_SECONDS_MAX, Done)
    return True


def _request(
    sock: socket.socket, request: Message, fds: Sequence[int], seconds: float
) -> RemoteKernel:
    try:
        state = _exchange(sock, request, fds, seconds, KernelState)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    assert isinstance(state, KernelState)
    return RemoteKernel(sock, state)


def _exchange(
    sock: socket.socket,
    request: Message,
    fds: Sequence[int],
    seconds: float,
    reply_type: type[Message],
) -> Message:
    sock.settimeout(seconds)
    try:
        send_message(sock, request, fds)
        reply, received = recv_message(sock)
    except TimeoutError as error:
        text = f"The kernel host did not answer within {seconds:g} seconds."
        raise ControlError(text, "timeout") from error
    except (OSError, ProtocolError) as error:
        text = f"The connection to the kernel host broke ({error})."
        raise ControlError(text, "broken") from error
    for fd in received:
        os.close(fd)
    if isinstance(reply, Error):
        raise ControlError(reply.message, reply.reason)
    if not isinstance(reply, reply_type):
        raise ControlError("The kernel host gave an unexpected answer.", "failed")
    return reply


def _connect(start: bool) -> socket.socket:
    place = directory()
    path = place / SOCKET_NAME
    absent = contextlib.suppress(FileNotFoundError, ConnectionRefusedError)
    with absent, agent_client.start_lock(place, fcntl.LOCK_SH):
        return agent_client.open_socket(path)
    if not start:
        raise ControlError("No kernel host is running.", "no-daemon")
    with agent_client.start_lock(place, fcntl.LOCK_EX):
        with absent:  # another process may have started it meanwhile
            return agent_client.open_socket(path)
        agent_client.start_detached(
            paths.runtime_dir(), ("-m", "kernelproxy.kernel_host"),
            log="attendant.log", who="kernel host",
        )  # fmt: skip
        try:
            return agent_client.open_socket(path)
        except OSError as error:
            raise ControlError(
                f"The kernel host started and left at once; see {path.parent.parent}"
                "/attendant.log.",
                "no-daemon",
            ) from error
