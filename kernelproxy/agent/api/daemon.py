"""The jupyter_sing daemon: owns the devices of a host. There is one per runtime directory."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import importlib.metadata
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kernelproxy.agent.api import daemon_log
from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.peer_limits import LogFilter, PeerLimits
from kernelproxy.agent.api.request_handlers import RequestHandlers
from kernelproxy.agent.api.socket_file import LOCK_NAME, POLL_SECONDS, SocketFile
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.supervisor.fdstore import FdStore, InheritedState, end_workers, receive_state
from kernelproxy.agent.workers.crash_policy import is_want
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import Keep
from kernelproxy.common.scheduler_api import Arbiter
from kernelproxy.common.system_mode import Place, own_place, system_place
from kernelproxy.devices import configured_devices
from kernelproxy.devices.locks import claim
from kernelproxy.kernel import gpu_access

log = logging.getLogger(__name__)

#: As large as the system allows: a client that connects in a loop must not keep the queue full.
_BACKLOG = 4096
_ACCEPTS_AT_ONCE = 64
_SYSTEM_THREADS = 64
_LOCK_POLL_SECONDS = 0.05
#: Seconds until connections are accepted again, after descriptors or memory ran out.
ACCEPT_PAUSE_SECONDS = 1.0
#: Group of the entry points with which packages provide a scheduler.
ARBITERS = "kernelproxy.arbiters"


class Daemon:
    """Serves the socket of one place.

    Note [Leaving]: a client (`agent_client.connect`) holds the directory's start lock, shared while
    it connects, and exclusive while it starts a daemon. A daemon leaves only while it holds that
    lock exclusively and no connection waits, and it keeps the lock until its process has ended. So
    no client connects to a daemon that will not answer, and the next daemon starts after this one
    has ended. The system daemon leaves only when it is stopped; its clients do not use this lock.

    Note [Dying]: an agent that is killed does not leave. Its supervisor also holds the daemon's
    lock and its listening socket. So no other daemon can be started, and clients that connect wait
    for the agent that the supervisor starts. That agent recovers the sessions (Note [Persisting]).

    Parameters
    ----------
    place : Place
    lock : int
        Descriptor of the lock on `place`, which is held.
    agent_settings : AgentSettings
    command : sequence of str
        See `Keep`.
    inherited : InheritedState, optional
        What the supervisor held for the dead agent that this one replaces.
    arbiter : Arbiter, optional
        See `Agent`.
    """

    def __init__(
        self,
        place: Place,
        lock: int,
        agent_settings: AgentSettings,
        command: Sequence[str],
        inherited: InheritedState | None,
        arbiter: Arbiter | None = None,
    ) -> None:
        self._place, self._settings, self._inherited = place, agent_settings, inherited
        self._conversing: set[asyncio.Task[None]] = set()
        self._guests = PeerLimits() if place.system else None
        self._timer: asyncio.TimerHandle | None = None
        # The supervisor holds the last agent's locks, so no other daemon can have taken its GPUs.
        self._claim = claim(configured_devices(), None if inherited is None else inherited.devices)
        for sentence in self._claim.elsewhere:
            log.warning("%s", sentence)
        self._door = SocketFile(place, lock, None if inherited is None else inherited.listener)
        keep = Keep(list(command), str(place.socket))
        self._fdstore = FdStore(
            keep, lock, self._door.listener, self._claim.locks, lambda: self._agent.persist()
        )
        self._agent = Agent(
            self._claim.devices, agent_settings, self._fdstore, self._on_quiet, arbiter
        )
        self._agent.elsewhere = self._claim.elsewhere
        self._conversations = RequestHandlers(self._agent)

    async def serve(self, ready_fd: int) -> None:
        """Report readiness; serve until the daemon is stopped or has had no session for a while."""
        loop = asyncio.get_running_loop()
        if self._place.system:  # there are many jobs that a user can make wait
            loop.set_default_executor(ThreadPoolExecutor(_SYSTEM_THREADS, "sing-work"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._agent.stopping.set)
        self._listen()
        if self._inherited is None:
            await self._fdstore.start()
        else:
            self._fdstore.resume(self._inherited)
            try:
                self._agent.adopt(self._inherited.sessions)
            except (OSError, MemoryError) as error:
                log.error("No session can be taken over now: %s", error)  # noqa: TRY400
                os._exit(1)  # as if killed: the supervisor has everything, and starts another agent
        self._agent.begin()
        self._admit()
        self._bound_log()
        self._watch_door()
        self._on_quiet()
        _report(ready_fd, "ready")
        await self._agent.stopping.wait()
        loop.remove_reader(self._door.listener)
        self._fdstore.announce_end()  # from here on, an agent that dies is not replaced
        # Unlinked first: clients now find no daemon, and wait for the lock to start one.
        self._door.close()
        await self._fdstore.close()
        await self._agent.close()
        self._claim.close()  # before the lock: the next daemon here must find them free
        await self._conversations.announce_end()
        for task in self._conversing:
            task.cancel()
        await asyncio.gather(*self._conversing, return_exceptions=True)

    def _listen(self) -> None:
        """Listen, also on an inherited socket: then clients see this process as their peer."""
        self._door.listener.setblocking(False)
        self._door.listener.listen(_BACKLOG)

    def _watch_door(self) -> None:
        """Make the socket again if its file is gone; see Note [Door]."""
        if self._agent.stopping.is_set():
            return
        loop = asyncio.get_running_loop()
        loop.call_later(POLL_SECONDS, self._watch_door)
        try:
            before = self._door.repaired()
        except OSError as error:
            log.warning("The socket has gone, and cannot be made anew: %s", error)
            return
        if before is not None:
            log.warning("The socket had gone: there is another one")
            loop.remove_reader(before)
            before.close()  # clients that wait there connect again
            self._listen()
            self._admit()
            self._fdstore.listen_to(self._door.listener)

    def _accept(self) -> bool:
        """Accept waiting connections, up to a maximum; return True if there was one."""
        accepted = False
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError), self._spare():
            for _ in range(_ACCEPTS_AT_ONCE):
                sock, _ = self._door.listener.accept()
                accepted = True
                channel = Channel(sock) if self._guests is None else self._guests.admit(sock)
                if channel is None:
                    continue
                task = asyncio.create_task(channel.charged(self._conversations.converse(channel)))
                self._conversing.add(task)
                task.add_done_callback(self._conversing.discard)
        return accepted

    @contextlib.contextmanager
    def _spare(self) -> Iterator[None]:
        """Pause accepting if there are not enough descriptors or memory for a connection."""
        try:
            yield
        except OSError as error:
            if not is_want(error):
                raise
            log.warning(
                "No connections are accepted for %g s: %s", ACCEPT_PAUSE_SECONDS, error.strerror
            )
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._door.listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._admit)

    def _admit(self) -> None:
        """Accept connections from now on, unless the daemon is stopping."""
        if not self._agent.stopping.is_set():
            asyncio.get_running_loop().add_reader(self._door.listener, self._accept)

    def _bound_log(self) -> None:
        """Limit the size of the log while the daemon runs."""
        with contextlib.suppress(OSError):  # a failure to log must not end the daemon
            daemon_log.bound(self._place.private / "agent.log")
        asyncio.get_running_loop().call_later(daemon_log.POLL_SECONDS, self._bound_log)

    def _on_quiet(self) -> None:
        """Leave after a while if there is still no session then."""
        if self._place.system:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.linger, self._leave_if_quiet)

    def _leave_if_quiet(self) -> None:
        """Leave, if there is no session and no client; see Note [Leaving]."""
        if self._agent.sessions or self._agent.stopping.is_set():
            return None
        path = self._place.private / "start.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.warning("The daemon cannot leave: %s", error)
            return self._on_quiet()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return self._on_quiet()
        # Subscribers do not keep the daemon alive: they can subscribe to the next one.
        if self._accept() or len(self._conversing) > self._conversations.watchers:
            os.close(lock)
            return self._on_quiet()
        log.info("No session for %g s: the daemon leaves", self._settings.linger)
        self._agent.stopping.set()  # the lock is held until the process ends
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon; ``python -m kernelproxy.agent``."""
    parser = argparse.ArgumentParser(prog="python -m kernelproxy.agent", description=__doc__)
    parser.add_argument("--foreground", action="store_true", help="log to the terminal")
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument(
        "--keeper-fd", dest="supervisor_fd", type=int, default=-1, help=argparse.SUPPRESS
    )
    parser.add_argument("--system", action="store_true", help="serve all users; for root")
    parser.add_argument("--group", help="of those who may use the system daemon")
    options = parser.parse_args(arguments)
    if options.ready_fd >= 0 and os.fork() != 0:
        # The starter waits for this process only, so it need not reap the daemon later.
        os._exit(0)
    again, place = [sys.executable, "-m", "kernelproxy.agent"], None
    if options.system:
        again[1:1] = ["-P"]  # root must not import from a directory that a user chose
        again += ["--system", *(["--group", options.group] if options.group else [])]
        try:
            place = system_place(options.group)  # before other code looks up its directories
        except ControlError as error:
            _report(options.ready_fd, str(error))
            return 1
    again.append("--keeper-fd")
    arbiter = _installed_arbiter()
    return run(options.ready_fd, again, options.supervisor_fd, arbiter=arbiter, place=place)


def _installed_arbiter() -> Arbiter | None:
    """Return the scheduler of another package, if any (an entry point without arguments)."""
    for found in importlib.metadata.entry_points(group=ARBITERS):
        arbiter: Arbiter = found.load()()
        return arbiter
    return None


def run(
    ready_fd: int,
    command: Sequence[str],
    supervisor_fd: int,
    settings: AgentSettings | None = None,
    arbiter: Arbiter | None = None,
    place: Place | None = None,
) -> int:
    """Take the lock, or recover what a dead agent had; serve; return the exit status.

    Parameters
    ----------
    ready_fd : int
        Where to write ``ready`` or an error, for the process that started this one; -1: standard
        error.
    command : sequence of str
        Command that starts another agent like this one; the number of `supervisor_fd` is appended.
    supervisor_fd : int
        The connection to the supervisor that started this agent; -1: this is the first agent.
    settings : AgentSettings, optional
        By default they are read from the environment.
    arbiter : Arbiter, optional
        See `Agent`.
    place : Place, optional
        By default this user's own.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    for name in ("SING_SESSION", "SING_SOCKET"):
        os.environ.pop(name, None)
    gpu_access.restore(os.environ)
    _raise_fd_limit()
    os.chdir("/")
    try:
        place = place or own_place()
        inherited = receive_state(supervisor_fd) if supervisor_fd >= 0 else None
        if inherited is not None:
            end_workers(inherited.sessions)
        lock = _lock(place) if inherited is None else inherited.lock
        if place.system:
            for handler in logging.getLogger().handlers:
                handler.addFilter(LogFilter())
        settings = replace(settings or AgentSettings.from_environment(), system=place.system)
        asyncio.run(_serve(place, lock, settings, command, inherited, arbiter, ready_fd))
    except SingError as error:
        _report(ready_fd, str(error))
        return 1
    os.close(lock)
    return 0


async def _serve(
    place: Place,
    lock: int,
    settings: AgentSettings,
    command: Sequence[str],
    inherited: InheritedState | None,
    arbiter: Arbiter | None,
    ready_fd: int,
) -> None:
    await Daemon(place, lock, settings, command, inherited, arbiter).serve(ready_fd)


def _lock(place: Place) -> int:
    """Take the lock of a place, which its one daemon holds; wait for a daemon that leaves."""
    lock = os.open(place.private / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if place.socket.exists():
                os.close(lock)
                raise ControlError(
                    f"A daemon runs in {place.directory} already.", "failed"
                ) from None
            time.sleep(_LOCK_POLL_SECONDS)  # the holder leaves, or makes its socket again
        else:
            return lock


def _report(ready_fd: int, text: str) -> None:
    """Report to the process that started this one; a failure to do so is ignored."""
    if ready_fd < 0:
        with contextlib.suppress(OSError):  # such as of a log on a full disk
            os.write(sys.stderr.fileno(), f"jupyter_sing daemon: {text}\n".encode())
        return
    with contextlib.suppress(BrokenPipeError):  # the starter has stopped waiting
        os.write(ready_fd, f"{text}\n".encode())
    os.close(ready_fd)


def _raise_fd_limit() -> None:
    """Raise the limit of descriptors to what the system allows: a session takes about twelve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
