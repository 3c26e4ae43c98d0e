"""The agent's side of its supervisor: persists sessions there, and recovers a dead agent's.

Note [Persisting]: the agent may be killed between any two steps. A session is persisted once the
message is sent, because what is in a socket is received even if its sender is dead. What other
processes can see is persisted before it is published, never after: a worker's process before the
worker receives its session, a snapshot before the log below it may be overwritten, a kernel before
it receives the descriptors. So what was persisted last, the log and the pages always suffice to
rebuild the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelproxy.agent.supervisor.supervisor import end_processes
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Deposit, Done, Farewell, Keep, KeepDevice, Message, Withdraw
from kernelproxy.common.shared_memory import AgentPage, Presence, close_all

log = logging.getLogger(__name__)

#: Changes with the meaning of a record: an agent of another version cannot recover its session.
RECORD_VERSION = 3
HAND_OVER_SECONDS = 60.0
#: How long sending may wait for a supervisor that reads nothing. It blocks the event loop.
STALL_SECONDS = 5.0
RETRY_SECONDS = 1.0


@dataclass
class PersistedSession:
    """The persisted state of one session. After `receive_state` it owns its descriptors.

    Parameters
    ----------
    session : str
    record : dict
        JSON.
    fds : list of (str, int)
        Named descriptors: see `Deposit.names`.
    worker_remains : bool
        True if one of its workers cannot be ended.
    """

    session: str
    record: dict[str, Any]
    fds: list[tuple[str, int]]
    worker_remains: bool = False

    def take(self, name: str) -> int | None:
        """Return a descriptor, of which the caller takes ownership; None if there is none."""
        for index, (found, fd) in enumerate(self.fds):
            if found == name:
                del self.fds[index]
                return fd
        return None

    def __enter__(self) -> PersistedSession:
        page = next(fd for name, fd in self.fds if name == "agent")
        self._page = AgentPage(page, writable=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the descriptors that were not taken."""
        self._page.close()
        close_all([fd for _, fd in self.fds])
        self.fds.clear()

    def end(self, reason: str) -> None:
        """Notify its client why the session has ended, unless it has another reason already."""
        if self._page.presence != Presence.ENDED:
            self._page.reason, self._page.presence = reason, Presence.ENDED
            self._page.ring()


@dataclass
class InheritedState:
    """Everything that an agent takes over from one that died. Owns its descriptors."""

    connection: socket.socket
    lock: int
    listener: socket.socket
    supervisor: int
    sessions: list[PersistedSession]
    devices: dict[str, int]


def receive_state(fd: int) -> InheritedState:
    """Receive what the supervisor holds for the agent that it started.

    Parameters
    ----------
    fd : int
        The connection to the supervisor. Takes ownership.

    Raises
    ------
    ControlError
        If the supervisor does not send what it should.
    """
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    connection.settimeout(HAND_OVER_SECONDS)
    sessions: list[PersistedSession] = []
    devices: dict[str, int] = {}
    try:
        message, (lock, listener, supervisor) = recv_message(connection)
        while not isinstance(message, Done):
            message, fds = recv_message(connection)
            if isinstance(message, KeepDevice):
                (devices[message.node],) = fds
            elif isinstance(message, Deposit):
                named = list(zip(message.names, fds, strict=True))
                sessions.append(PersistedSession(message.session, message.record, named))
    except (OSError, ProtocolError, ValueError) as error:
        raise ControlError(f"The supervisor handed nothing over: {error}", "failed") from error
    sessions.sort(key=lambda each: each.record.get("since", 0.0))
    return InheritedState(
        connection, lock, socket.socket(fileno=listener), supervisor, sessions, devices
    )


def end_workers(sessions: Sequence[PersistedSession]) -> None:
    """End the workers of the agent that died, so that never two serve one session.

    They end by themselves when their connection does, but not if a signal has stopped them.
    """
    left = end_processes([fd for each in sessions for name, fd in each.fds if name == "process"])
    for each in sessions:
        each.worker_remains = any(fd in left for _, fd in each.fds)


class FdStore:
    """Persists sessions with a supervisor; starts it, and starts another one when it dies.

    Parameters
    ----------
    keep : Keep
    lock : int
    listener : socket.socket
        Owned by the caller, like `lock`.
    devices : mapping of str to int
        Locks on GPUs, by path of the GPU's file; owned by the caller.
    everything : callable
        Persists each session, by `put`.
    """

    def __init__(
        self,
        keep: Keep,
        lock: int,
        listener: socket.socket,
        devices: Mapping[str, int],
        everything: Callable[[], object],
    ) -> None:
        self._keep, self._lock, self._listener = keep, lock, listener
        self._devices = devices
        self._everything = everything
        self._connection: socket.socket | None = None
        self._pidfd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start a supervisor and persist everything.

        Raises
        ------
        OSError
            If no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # Off the loop: starting a process waits for its exec.
                process = await asyncio.to_thread(self._launch, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        self._process = process
        self._started_at = time.monotonic()
        self._join(ours, os.pidfd_open(process.pid))
        self._announce_kept()
        self._keep_devices()
        self._everything()

    def _announce_kept(self) -> None:
        pidfd = os.pidfd_open(os.getpid())
        self._send(self._keep, [self._lock, self._listener.fileno(), pidfd])
        os.close(pidfd)

    def _keep_devices(self) -> None:
        for node, lock in self._devices.items():
            self._send(KeepDevice(node), [lock])

    def listen_to(self, listener: socket.socket) -> None:
        """Replace the listening socket that the supervisor holds; the caller owns the new one."""
        self._listener = listener
        self._announce_kept()

    def resume(self, inherited: InheritedState) -> None:
        """Continue with the supervisor from which `inherited` came."""
        self._join(inherited.connection, inherited.supervisor)
        self._keep_devices()  # including those that became free meanwhile

    def put(self, persisted: PersistedSession) -> None:
        """Persist a session, in place of what was persisted before; see Note [Persisting].

        The caller keeps ownership of its descriptors. Without a supervisor nothing is done: the
        next one receives everything.
        """
        names, fds = zip(*persisted.fds, strict=True)
        self._send(Deposit(persisted.session, persisted.record, list(names)), fds)

    def drop(self, session: str) -> None:
        """Remove the persisted state of a session that has ended."""
        self._send(Withdraw(session))

    def announce_end(self) -> None:
        """Order the supervisor not to replace this agent any more; `close` must follow."""
        self._closed = True
        if self._replacing is not None:
            self._replacing.cancel()
        self._send(Farewell())

    async def close(self) -> None:
        """Wait until the supervisor has ended, and so does not hold the daemon's lock any more."""
        if self._replacing is not None:
            await asyncio.wait({self._replacing})
        if (connection := self._connection) is None:
            return
        self._detach()
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(STALL_SECONDS):
                await asyncio.get_running_loop().sock_recv(connection, 1)
        self._bury(connection)

    def _launch(self, fd: int) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        # This interpreter may find this package by a path that is not in its environment.
        search = [str(paths.bundle_dir()), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, search)))
        return subprocess.Popen(
            [sys.executable, "-m", "kernelproxy.agent.supervisor.supervisor", str(fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
            env=environment,
            start_new_session=True,
        )

    def _join(self, connection: socket.socket, pidfd: int) -> None:
        connection.settimeout(STALL_SECONDS)
        self._connection, self._pidfd = connection, pidfd
        asyncio.get_running_loop().add_reader(connection, self._lost)  # it only sends its end

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        if self._connection is None:
            return
        try:
            send_message(self._connection, message, fds)
        except OSError as error:
            log.warning("The supervisor does not receive: %s", error)
            self._lost()

    def _lost(self) -> None:
        """Start another supervisor, as this one has died or hangs."""
        if (connection := self._connection) is None:
            return
        self._detach()
        self._bury(connection)
        if not self._closed:
            log.warning("The supervisor ended: the next one starts")
            self._replacing = asyncio.create_task(self._replace())

    def _detach(self) -> None:
        """Stop sending and receiving."""
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection = None

    def _bury(self, connection: socket.socket) -> None:
        """End the supervisor, if it lives: two must not run at the same time."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        connection.close()
        os.close(self._pidfd)
        self._pidfd = -1
        if self._process is not None:
            self._process.wait()
            self._process = None

    async def _replace(self) -> None:
        if time.monotonic() - self._started_at < RETRY_SECONDS:
            await asyncio.sleep(RETRY_SECONDS)  # back off: it died soon after its start
        while True:
            try:
                return await self.start()
            except OSError as error:
                log.warning("No supervisor could be started: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
