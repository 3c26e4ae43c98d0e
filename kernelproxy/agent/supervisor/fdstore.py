"""The agent's end of its keeper: what is deposited there, and what a predecessor left there.

Note [Deposits]: the agent may be killed between any two steps. A deposit is made once it was sent,
as whatever lies in a socket is received though its sender be dead. What others can see is published
after it was deposited, never before: a worker's process before the worker is told its session, a
snapshot before the log below it may be overwritten, a kernel before it has the descriptors. So the
newest deposit, the log and the pages always rebuild the session.
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

#: Changes with what a record means: an agent of another version cannot take its session over.
RECORD_VERSION = 3
HAND_OVER_SECONDS = 60.0
#: How long a deposit may wait for a keeper that reads nothing. The loop stands still meanwhile.
STALL_SECONDS = 5.0
RETRY_SECONDS = 1.0


@dataclass
class Deposited:
    """One session as it is deposited. After `take_over` it owns its descriptors.

    Parameters
    ----------
    session : str
    record : dict
        JSON.
    fds : list of (str, int)
        Named descriptors: see `Deposit.names`.
    stuck : bool
        Whether a worker of it cannot be ended.
    """

    session: str
    record: dict[str, Any]
    fds: list[tuple[str, int]]
    stuck: bool = False

    def take(self, name: str) -> int | None:
        """Take a descriptor out, which becomes the caller's; None if there is none."""
        for index, (found, fd) in enumerate(self.fds):
            if found == name:
                del self.fds[index]
                return fd
        return None

    def __enter__(self) -> Deposited:
        page = next(fd for name, fd in self.fds if name == "agent")
        self._page = AgentPage(page, writable=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the descriptors that nobody took."""
        self._page.close()
        close_all([fd for _, fd in self.fds])
        self.fds.clear()

    def end(self, reason: str) -> None:
        """Tell its client, unless it was told another reason, why the session has ended."""
        if self._page.presence != Presence.ENDED:
            self._page.reason, self._page.presence = reason, Presence.ENDED
            self._page.ring()


@dataclass
class Estate:
    """What an agent takes over from one that died. Owns its descriptors."""

    connection: socket.socket
    lock: int
    listener: socket.socket
    keeper: int
    sessions: list[Deposited]
    devices: dict[str, int]


def take_over(fd: int) -> Estate:
    """Receive what the keeper has for the agent that it started.

    Parameters
    ----------
    fd : int
        The connection to the keeper, owned from now on.

    Raises
    ------
    ControlError
        If the keeper does not say what it should.
    """
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    connection.settimeout(HAND_OVER_SECONDS)
    sessions: list[Deposited] = []
    devices: dict[str, int] = {}
    try:
        message, (lock, listener, keeper) = recv_message(connection)
        while not isinstance(message, Done):
            message, fds = recv_message(connection)
            if isinstance(message, KeepDevice):
                (devices[message.node],) = fds
            elif isinstance(message, Deposit):
                named = list(zip(message.names, fds, strict=True))
                sessions.append(Deposited(message.session, message.record, named))
    except (OSError, ProtocolError, ValueError) as error:
        raise ControlError(f"The keeper handed nothing over: {error}", "failed") from error
    sessions.sort(key=lambda each: each.record.get("since", 0.0))
    return Estate(connection, lock, socket.socket(fileno=listener), keeper, sessions, devices)


def end_workers(sessions: Sequence[Deposited]) -> None:
    """End the workers of the agent that died, lest two of them serve one session.

    They end by themselves when their connection does, but not if they are stopped.
    """
    left = end_processes([fd for each in sessions for name, fd in each.fds if name == "process"])
    for each in sessions:
        each.stuck = any(fd in left for _, fd in each.fds)


class Deposits:
    """Deposits with a keeper, which it starts and, when it dies, starts again.

    Parameters
    ----------
    keep : Keep
    lock : int
    listener : socket.socket
        The caller's, like `lock`.
    devices : mapping of str to int
        Locks on GPUs, by path of the GPU's file; the caller's.
    everything : callable
        Deposits each session, by `put`.
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
        self._begun = 0.0
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start a keeper and deposit everything.

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
        self._begun = time.monotonic()
        self._join(ours, os.pidfd_open(process.pid))
        self._tell_what_to_keep()
        self._keep_devices()
        self._everything()

    def _tell_what_to_keep(self) -> None:
        pidfd = os.pidfd_open(os.getpid())
        self._send(self._keep, [self._lock, self._listener.fileno(), pidfd])
        os.close(pidfd)

    def _keep_devices(self) -> None:
        for node, lock in self._devices.items():
            self._send(KeepDevice(node), [lock])

    def listen_to(self, listener: socket.socket) -> None:
        """Have another listening socket kept from now on, which is the caller's."""
        self._listener = listener
        self._tell_what_to_keep()

    def resume(self, estate: Estate) -> None:
        """Go on with the keeper that has what is in `estate`."""
        self._join(estate.connection, estate.keeper)
        self._keep_devices()  # those, too, that became free meanwhile

    def put(self, deposited: Deposited) -> None:
        """Deposit a session, instead of what was deposited before; see Note [Deposits].

        Its descriptors stay the caller's. Without a keeper nothing is done: the next one is told
        everything.
        """
        names, fds = zip(*deposited.fds, strict=True)
        self._send(Deposit(deposited.session, deposited.record, list(names)), fds)

    def drop(self, session: str) -> None:
        """A session has ended."""
        self._send(Withdraw(session))

    def say_farewell(self) -> None:
        """From now on nobody takes this agent's place; `close` is to follow."""
        self._closed = True
        if self._replacing is not None:
            self._replacing.cancel()
        self._send(Farewell())

    async def close(self) -> None:
        """Wait until the keeper has ended, and with it its hold on the daemon's lock."""
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
        # This interpreter may know us only by a path that its environment does not name.
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
        asyncio.get_running_loop().add_reader(connection, self._lost)  # it says nothing else

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        if self._connection is None:
            return
        try:
            send_message(self._connection, message, fds)
        except OSError as error:
            log.warning("The keeper does not receive: %s", error)
            self._lost()

    def _lost(self) -> None:
        """The keeper has died or hangs: start another one."""
        if (connection := self._connection) is None:
            return
        self._detach()
        self._bury(connection)
        if not self._closed:
            log.warning("The keeper ended: the next one starts")
            self._replacing = asyncio.create_task(self._replace())

    def _detach(self) -> None:
        """Say and hear nothing more."""
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection = None

    def _bury(self, connection: socket.socket) -> None:
        """End the keeper, if it lives: a second one must not find it at work."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        connection.close()
        os.close(self._pidfd)
        self._pidfd = -1
        if self._process is not None:
            self._process.wait()
            self._process = None

    async def _replace(self) -> None:
        if time.monotonic() - self._begun < RETRY_SECONDS:
            await asyncio.sleep(RETRY_SECONDS)  # one that cannot live is no reason to hurry
        while True:
            try:
                return await self.start()
            except OSError as error:
                log.warning("No keeper could be started: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
