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
from kernelproxy.common.protocol import Error, Message, Progress

__all__ = ["Control", "ControlError", "connect", "runtime_dir"]

runtime_dir = paths.runtime_dir

#: Half a second is usual, and twelve were seen on a machine that was short of everything.
START_SECONDS_MAX = 60.0
#: How long to try for a place in the queue of the daemon's socket.
QUEUE_SECONDS_MAX = 2.0
_LOG_BYTES_MAX = 1 << 20
Reply = TypeVar("Reply", bound=Message)
Show = Callable[[int, int], object]


class Control:
    """A connection to the daemon. Not for use by several threads at once.

    Parameters
    ----------
    sock : socket.socket
        A connected socket, owned from now on.
    path : Path, optional
        Where it is connected to. With it, a request during which the daemon dies is made once
        more, to the daemon that takes its place: none does harm when it is made twice.
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
            Seconds to wait; None: as long as it takes.

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
        """Like `call`, and also return the reply's descriptors, which become the caller's.

        `fds` go with the request, and stay the caller's.
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
        """Wait for the next message of a reply that has several; raises as `call`."""
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
            Called with what is done and in total, now and then.
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
            If it is too large: nothing of it was sent.
        OSError
            If the daemon has gone without a word.
        """
        try:
            frame = encode(request, len(fds))
        except ProtocolError as error:
            raise ControlError(str(error), "bad-request") from error
        try:
            send_frame(sock, frame, fds)
        except (BrokenPipeError, ConnectionResetError):
            # It may have said why before it hung up, as it does when a message is too large.
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
        """Process id of the daemon, as the kernel knows it.

        Raises
        ------
        ControlError
            If the connection is closed.
        """
        if self._sock is None:
            raise ControlError("The connection to the jupyter_sing daemon is closed.", "no-daemon")
        return credentials(self._sock)[0]

    def detach(self) -> socket.socket:
        """Give up the socket, blocking and without a timeout: it becomes the caller's.

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
        """Have another thread wait no more for a reply: it gets a `ControlError`."""
        self._path = None  # and does not ask the next daemon
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; doing it twice is no error."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            absence.current.note_closed(self)


def connect(start: bool = True, path: Path | None = None) -> Control:
    """Connect to this user's daemon. While its keeper replaces one that died, this waits, as it
    does while this process is away (see `kernelproxy.common.ipc.detach`).

    Parameters
    ----------
    start : bool
        Start the daemon if none runs. Never done in a kernel (``SING_SOCKET`` is set): the
        daemon that had its session is gone, and a new one would not know it.
    path : Path, optional
        Its socket; by default the one that the environment names.

    Raises
    ------
    ControlError
        If there is no daemon (reason ``no-daemon``) or it cannot be started.
    """
    with absence.current.connecting():
        return connect_now(start, path)


def connect_now(start: bool = True, path: Path | None = None) -> Control:
    """Like `connect`, also for a process that is away and on its way back."""
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
        # Somebody else may have started it while we waited for the lock.
        with absent:
            return Control(open_socket(path), path)
        try:
            start_detached(path.parent)
        except ControlError:
            with absent:  # one lives whose socket had gone for a moment
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
    """Connect to this user's daemon if there is one, without waiting for it to do anything.

    Where others connect so fast that there is no place in the queue, this tries again for
    `QUEUE_SECONDS_MAX`.

    Only for who asks for nothing that is to be done: the daemon may be about to leave, and then the
    connection ends. While its keeper replaces one that died, the next one answers.

    Parameters
    ----------
    path : Path, optional
        As in `connect`.

    Returns
    -------
    socket.socket or None
        It does not block; None: there is no daemon.

    Raises
    ------
    ControlError
        If there is one that cannot be reached now.
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
    """Connect a socket that does not block; raises BlockingIOError if there is no place for long.

    Waiting in the queue would be fairer, and has no bound.
    """
    end, pause = time.monotonic() + QUEUE_SECONDS_MAX, 0.0005
    while True:
        try:
            return sock.connect(name)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(pause * (0.5 + random.random()))
        pause = min(2 * pause, 0.02)


def _connect_to_system(path: Path) -> Control:
    """Connect to the system daemon, which root starts and stops: there is nothing to lock."""
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
    """Raise ControlError unless root listens at the other end."""
    _, uid, _ = credentials(sock)
    if uid != 0:
        raise ControlError(f"{path} is served by user {uid}, not by root.", "unsafe-directory")


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group id of who listened at the other end, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


@contextlib.contextmanager
def start_lock(directory: Path, operation: int) -> Iterator[None]:
    """Hold the lock that orders connecting (shared), starting and leaving (exclusive).

    A daemon that leaves holds it until its process has ended, so that nobody connects to a
    daemon that will not serve him, and no two start.
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
    """Start a detached process and wait until it serves (or says why it cannot).

    Parameters
    ----------
    directory : Path
        The runtime directory, where its log is.
    arguments : sequence of str
        Of the interpreter; ``--ready-fd`` is added.
    log : str
        Name of its log.
    who : str
        What it is, for people.

    Raises
    ------
    ControlError
        If it cannot be started.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("SING_SESSION", "SING_SOCKET")}
    environment["JUPYTER_SING_RUNTIME_DIR"] = str(directory)
    # This interpreter may know us only by a path that its environment does not name.
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
        process.wait()  # it forks the daemon and ends: nobody's child is left to be reaped
        os.close(write_end)
        write_end = -1
        said = _read_line(ready, START_SECONDS_MAX)
    finally:
        os.close(ready)
        if write_end >= 0:
            os.close(write_end)
    if said == "ready":
        return
    raise ControlError(
        f"The jupyter_sing {who} could not start: {said or f'see {log_path}'}", "no-daemon"
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
