"""Synchronous access to the daemon, for kernels and front ends (standard library only)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc import detach as absence
from kernelproxy.common.ipc.fd_wait import readable
from kernelproxy.common.ipc.framing import encode, recv_message, send_frame
from kernelproxy.common.options import RUNTIME_DIR
from kernelproxy.common.protocol import Error, Message, Progress

__all__ = ["Control", "ControlError", "connect", "runtime_dir"]

runtime_dir = paths.runtime_dir

#: Half a second is usual; twelve seconds were seen on an overloaded machine.
START_SECONDS_MAX = 60.0
#: How long to retry while the backlog of the daemon's socket is full.
QUEUE_SECONDS_MAX = 2.0
_LOG_BYTES_MAX = 1 << 20
Reply = TypeVar("Reply", bound=Message)
Show = Callable[[int, int], object]


class Control:
    """A connection to the daemon. Not thread-safe.

    Parameters
    ----------
    sock : socket.socket
        A connected socket; takes ownership.
    path : Path, optional
        Its address. If it is given and the daemon dies during a request, the request is sent once
        more, to the daemon that replaces it: all requests are idempotent.
    """

    def __init__(self, sock: socket.socket, path: Path | None = None) -> None:
        self._sock: socket.socket | None = sock
        self._path = path
        absence.current.note_opened(self)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, request: Message, timeout: float | None = None) -> Message:
        """Send a request and wait for its reply.

        Parameters
        ----------
        request : Message
            One of the requests of `kernelproxy.common.protocol`.
        timeout : float or None
            Seconds to wait; None: no limit.

        Raises
        ------
        ControlError
            If the daemon refuses, is gone, or does not answer in time. After the last two the
            connection is closed: a late reply could be taken for the next one's.
        """
        reply, fds = self.call_with_fds(request, timeout)
        for fd in fds:
            os.close(fd)
        return reply

    def call_with_fds(
        self, request: Message, timeout: float | None = None, fds: Sequence[int] = ()
    ) -> tuple[Message, list[int]]:
        """Like `call`, and also return the reply's descriptors, which the caller then owns.

        `fds` are sent with the request; the caller still owns them.
        """
        was_closed = self._sock is None
        try:
            return self._exchange(request, timeout, fds)
        except ControlError as error:
            if was_closed or error.reason != "no-daemon" or self._path is None:
                raise
            with contextlib.suppress(ControlError):
                self._sock = connect(start=False, path=self._path).detach()
            if self._sock is None:
                raise
            absence.current.note_opened(self)
        return self._exchange(request, timeout, fds)

    def more(self, timeout: float | None = None) -> Message:
        """Wait for the next message of a multi-message reply; raises as `call`."""
        reply, fds = self._exchange(None, timeout)
        for fd in fds:
            os.close(fd)
        return reply

    def last(
        self, request: Message, timeout: float | None = None, show: Show | None = None
    ) -> tuple[Message, list[int]]:
        """Like `call_with_fds`, for a reply before which `Progress` may come.

        Parameters
        ----------
        request : Message
        timeout : float or None
            Seconds to wait for each message.
        show : callable, optional
            Called with the amounts done and in total, at each `Progress`.
        """
        reply, fds = self.call_with_fds(request, timeout)
        while isinstance(reply, Progress):
            if show is not None:
                show(reply.done, reply.total)
            reply, fds = self._exchange(None, timeout)
        return reply, fds

    def _exchange(
        self, request: Message | None, timeout: float | None, fds: Sequence[int] = ()
    ) -> tuple[Message, list[int]]:
        if self._sock is None:
            raise ControlError("The connection to the jupyter_sing daemon is closed.", "no-daemon")
        self._sock.settimeout(timeout)
        try:
            if request is not None:
                self._send(self._sock, request, fds)
            reply, received = recv_message(self._sock)
        except TimeoutError as error:
            self.close()
            raise ControlError(
                f"The jupyter_sing daemon did not answer within {timeout:g} seconds.", "timeout"
            ) from error
        except (OSError, ProtocolError) as error:
            self.close()
            raise ControlError(
                f"The connection to the jupyter_sing daemon broke ({error}).", "no-daemon"
            ) from error
        if isinstance(reply, Error):
            raise ControlError(reply.message, reply.reason)
        return reply, received

    def _send(self, sock: socket.socket, request: Message, fds: Sequence[int]) -> None:
        """Send a request.

        Raises
        ------
        ControlError
            If it is too large; then nothing was sent.
        OSError
            If the daemon has disconnected without a reply.
        """
        try:
            frame = encode(request, len(fds))
        except ProtocolError as error:
            raise ControlError(str(error), "bad-request") from error
        try:
            send_frame(sock, frame, fds)
        except (BrokenPipeError, ConnectionResetError):
            # It may have sent an error before it disconnected, as for a message that is too large.
            if not readable(sock.fileno(), 0):
                raise

    def expect(
        self,
        reply_type: type[Reply],
        request: Message,
        timeout: float | None = None,
        show: Show | None = None,
    ) -> Reply:
        """Like `last`, for a reply of one type without descriptors.

        Raises
        ------
        ControlError
            As `call`, and if the daemon answers with something else.
        """
        reply, fds = self.last(request, timeout, show)
        for fd in fds:
            os.close(fd)
        if not isinstance(reply, reply_type):
            raise ControlError("The jupyter_sing daemon gave an unexpected answer.", "failed")
        return reply

    @property
    def daemon_pid(self) -> int:
        """Process id of the daemon, from the peer credentials.

        Raises
        ------
        ControlError
            If the connection is closed.
        """
        if self._sock is None:
            raise ControlError("The connection to the jupyter_sing daemon is closed.", "no-daemon")
        return credentials(self._sock)[0]

    def detach(self) -> socket.socket:
        """Return the socket, blocking and without a timeout; the caller takes ownership.

        Raises
        ------
        ControlError
            If the connection is closed.
        """
        if self._sock is None:
            raise ControlError("The connection to the jupyter_sing daemon is closed.", "no-daemon")
        sock, self._sock = self._sock, None
        absence.current.note_closed(self)
        sock.settimeout(None)
        return sock

    def abort(self) -> None:
        """Interrupt another thread that waits for a reply: it gets a `ControlError`."""
        self._path = None  # and does not retry with the next daemon
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            absence.current.note_closed(self)


def connect(start: bool = True, path: Path | None = None) -> Control:
    """Connect to this user's daemon.

    This waits while the supervisor replaces a daemon that died, and while this process is detached
    (see `kernelproxy.common.ipc.detach`).

    Parameters
    ----------
    start : bool
        Start the daemon if none runs. Never done in a kernel (``SING_SOCKET`` is set): the
        daemon with its session is gone, and a new one would not know the session.
    path : Path, optional
        The daemon's socket; by default that of the environment.

    Raises
    ------
    ControlError
        If there is no daemon (reason ``no-daemon``) or it cannot be started.
    """
    with absence.current.connecting():
        return connect_now(start, path)


def connect_now(start: bool = True, path: Path | None = None) -> Control:
    """Like `connect`, but do not wait if this process is detached; it is used to reattach."""
    path = path or paths.socket_path()
    if paths.is_shared(path):
        return _connect_to_system(path)
    absent = contextlib.suppress(FileNotFoundError, ConnectionRefusedError)
    with absent, start_lock(path.parent, fcntl.LOCK_SH):
        return Control(open_socket(path), path)
    if os.environ.get("SING_SOCKET"):
        raise ControlError(
            "The GPU session of this kernel has ended: restart the kernel, then %sing restore.",
            "no-daemon",
        )
    if not start:
        raise ControlError("No jupyter_sing daemon is running.", "no-daemon")
    with start_lock(path.parent, fcntl.LOCK_EX):
        # Another process may have started it while this one waited for the lock.
        with absent:
            return Control(open_socket(path), path)
        try:
            start_detached(path.parent)
        except ControlError:
            with absent:  # one runs whose socket was missing for a moment
                return Control(open_socket(path), path)
            raise
        try:
            return Control(open_socket(path), path)
        except OSError as error:
            raise ControlError(
                f"The jupyter_sing daemon started and left at once; see {path.parent}/agent.log.",
                "no-daemon",
            ) from error


def connect_to_watch(path: Path | None = None) -> socket.socket | None:
    """Connect to this user's daemon if there is one, without waiting for the daemon.

    While the socket's backlog is full, this retries for `QUEUE_SECONDS_MAX`.

    Only for callers that make read-only requests: the daemon may be about to end, and then the
    connection ends, too. While the supervisor replaces a daemon that died, the next one answers.

    Parameters
    ----------
    path : Path, optional
        As in `connect`.

    Returns
    -------
    socket.socket or None
        A non-blocking socket; None: there is no daemon.

    Raises
    ------
    ControlError
        If there is a daemon that cannot be reached now.
    """
    path = path or paths.socket_path()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with paths.short_path(path) as name:
            _connect_soon(sock, name)
        if paths.is_shared(path):
            _check_is_root(sock, path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise ControlError(f"{path} cannot be reached: {error.strerror}.", "no-daemon") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_soon(sock: socket.socket, name: str) -> None:
    """Connect a non-blocking socket; raises BlockingIOError if the backlog stays full.

    A blocking connect would be fairer, but has no time limit.
    """
    end, pause = time.monotonic() + QUEUE_SECONDS_MAX, 0.0005
    while True:
        try:
            return sock.connect(name)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(pause * (0.5 + random.random()))
        pause = min(2 * pause, 0.002)


def _connect_to_system(path: Path) -> Control:
    """Connect to the system daemon; root starts and stops it, so the start lock is not needed."""
    try:
        sock = open_socket(path)
    except (FileNotFoundError, ConnectionRefusedError):
        raise ControlError(
            "The jupyter_sing daemon of this machine does not run: its administrator can start it.",
            "no-daemon",
        ) from None
    except PermissionError:
        raise ControlError(
            f"{path} is for a group that you are not in: ask the administrator.", "not-allowed"
        ) from None
    try:
        _check_is_root(sock, path)
    except BaseException:
        sock.close()
        raise
    return Control(sock, path)


def _check_is_root(sock: socket.socket, path: Path) -> None:
    """Raise ControlError unless the peer runs as root."""
    _, uid, _ = credentials(sock)
    if uid != 0:
        raise ControlError(f"{path} is served by user {uid}, not by root.", "unsafe-directory")


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group id of the listening process, from the OS kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


@contextlib.contextmanager
def start_lock(directory: Path, operation: int) -> Iterator[None]:
    """Hold the lock that orders connecting (shared) with start and end of a daemon (exclusive).

    A daemon that ends holds it until its process has ended. So no client connects to a daemon that
    will not serve it, and two daemons never start at once.
    """
    try:
        fd = os.open(directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise ControlError("No jupyter_sing daemon is running.", "no-daemon") from None
    try:
        fcntl.flock(fd, operation)
        yield
    finally:
        os.close(fd)


def open_socket(path: Path) -> socket.socket:
    """Connect to the socket at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with paths.short_path(path) as name:
            sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def start_detached(
    directory: Path,
    arguments: Sequence[str] = ("-m", "kernelproxy.agent"),
    *,
    log: str = "agent.log",
    who: str = "daemon",
) -> None:
    """Start a detached process and wait until it serves, or reports why it cannot.

    Parameters
    ----------
    directory : Path
        The runtime directory, for its log.
    arguments : sequence of str
        Arguments of the interpreter; ``--ready-fd`` is added.
    log : str
        Name of its log.
    who : str
        User-facing name of the process.

    Raises
    ------
    ControlError
        If it cannot be started.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("SING_SESSION", "SING_SOCKET")}
    environment[RUNTIME_DIR.variable] = str(directory)
    # This interpreter may find our packages by a path that is not in its environment variables.
    search = [str(paths.bundle_dir()), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    log_path = directory / log
    with contextlib.suppress(FileNotFoundError):
        if log_path.stat().st_size > _LOG_BYTES_MAX:
            log_path.replace(directory / f"{log}.old")
    ready, write_end = os.pipe()
    try:
        with open(log_path, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments, "--ready-fd", str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(write_end,),
                cwd="/",
                env=environment,
            )
        process.wait()  # it forks the daemon and ends, so no zombie is left
        os.close(write_end)
        write_end = -1
        line = _read_line(ready, START_SECONDS_MAX)
    finally:
        os.close(ready)
        if write_end >= 0:
            os.close(write_end)
    if line == "ready":
        return
    raise ControlError(
        f"The jupyter_sing {who} could not start: {line or f'see {log_path}'}", "no-daemon"
    )


def _read_line(fd: int, seconds: float) -> str:
    """Read a pipe to its end or to the end of a line, for at most `seconds`."""
    deadline, text = time.monotonic() + seconds, b""
    while not text.endswith(b"\n"):
        if not readable(fd, deadline - time.monotonic()):
            return "it took too long."
        data = os.read(fd, 4096)
        if not data:
            break
        text += data
    return text.decode(errors="replace").strip()
