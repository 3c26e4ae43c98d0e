"""The daemon's process: one per runtime directory, from its lock to its leaving."""

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
from kernelproxy.agent.api.peer_limits import Guests, Modesty
from kernelproxy.agent.api.request_handlers import Conversations
from kernelproxy.agent.api.socket_file import LOCK_NAME, LOOK_SECONDS, Door
from kernelproxy.agent.settings import Settings
from kernelproxy.agent.supervisor.fdstore import Deposits, Estate, end_workers, take_over
from kernelproxy.agent.workers.crash_policy import is_want
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import Keep
from kernelproxy.common.scheduler_api import Arbiter
from kernelproxy.common.system_mode import Place, own_place, system_place
from kernelproxy.devices import configured_devices
from kernelproxy.devices.locks import claim

log = logging.getLogger(__name__)

#: As many as the system lets us have: who connects in a loop must not keep it full.
_BACKLOG = 4096
_ACCEPTS_AT_ONCE = 64
_SYSTEM_THREADS = 64
_LOCK_LOOK_SECONDS = 0.05
#: Who connects waits so long when there is nothing left to serve one more with.
ACCEPT_PAUSE_SECONDS = 1.0
#: The group of entry points that name arbiters.
ARBITERS = "kernelproxy.arbiters"


class Daemon:
    """Serves the socket of one place.

    Note [Leaving]: `control.connect` holds the directory's start lock, shared, while it
    connects, and exclusively while it starts a daemon. A daemon leaves only with that lock held
    exclusively and no connection waiting, and keeps it until its process has ended. So nobody
    connects to a daemon that will not answer, and the next one starts after this one's end. The
    system daemon leaves only when told to, and nobody else ever has its lock.

    Note [Dying]: an agent that is killed is not one that leaves. Its keeper has the daemon's lock
    and its listening socket too, so that nobody starts another daemon, and who connects waits for
    the agent that the keeper starts. That one takes the sessions over: see Note [Deposits].

    Parameters
    ----------
    place : Place
    lock : int
        The lock on it, which is held.
    agent_settings : Settings
    command : sequence of str
        See `Keep`.
    estate : Estate, optional
        What the agent left whose place this one takes.
    arbiter : Arbiter, optional
        See `Agent`.
    """

    def __init__(
        self,
        place: Place,
        lock: int,
        agent_settings: Settings,
        command: Sequence[str],
        estate: Estate | None,
        arbiter: Arbiter | None = None,
    ) -> None:
        self._place, self._settings, self._estate = place, agent_settings, estate
        self._conversing: set[asyncio.Task[None]] = set()
        self._guests = Guests() if place.system else None
        self._timer: asyncio.TimerHandle | None = None
        # While the keeper holds what the last agent had, nobody else can have taken it.
        self._claim = claim(configured_devices(), None if estate is None else estate.devices)
        for sentence in self._claim.elsewhere:
            log.warning("%s", sentence)
        self._door = Door(place, lock, None if estate is None else estate.listener)
        keep = Keep(list(command), str(place.socket))
        self._deposits = Deposits(
            keep, lock, self._door.listener, self._claim.locks, lambda: self._agent.deposit()
        )
        self._agent = Agent(
            self._claim.devices, agent_settings, self._deposits, self._on_quiet, arbiter
        )
        self._agent.elsewhere = self._claim.elsewhere
        self._conversations = Conversations(self._agent)

    async def serve(self, ready_fd: int) -> None:
        """Say that it is ready, and serve until told to stop or without sessions for a while."""
        loop = asyncio.get_running_loop()
        if self._place.system:  # there is much of what may wait for a user
            loop.set_default_executor(ThreadPoolExecutor(_SYSTEM_THREADS, "sing-work"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._agent.stopping.set)
        self._listen()
        if self._estate is None:
            await self._deposits.start()
        else:
            self._deposits.resume(self._estate)
            try:
                self._agent.adopt(self._estate.sessions)
            except (OSError, MemoryError) as error:
                log.error("No session can be taken over now: %s", error)  # noqa: TRY400
                os._exit(1)  # as if killed: the keeper has everything, and starts another agent
        self._agent.begin()
        self._admit()
        self._bound_log()
        self._watch_door()
        self._on_quiet()
        _tell(ready_fd, "ready")
        await self._agent.stopping.wait()
        loop.remove_reader(self._door.listener)
        self._deposits.say_farewell()  # from here on a death is an end, too
        # Unlinked first: who comes now finds no daemon, and waits for the lock to start one.
        self._door.close()
        await self._deposits.close()
        await self._agent.close()
        self._claim.close()  # before the lock: the next daemon here is to have them
        await self._conversations.say_farewell()
        for task in self._conversing:
            task.cancel()
        await asyncio.gather(*self._conversing, return_exceptions=True)

    def _listen(self) -> None:
        """Let others connect, also to a socket that is inherited: they see this process."""
        self._door.listener.setblocking(False)
        self._door.listener.listen(_BACKLOG)

    def _watch_door(self) -> None:
        """See Note [Door]."""
        if self._agent.stopping.is_set():
            return
        loop = asyncio.get_running_loop()
        loop.call_later(LOOK_SECONDS, self._watch_door)
        try:
            before = self._door.repaired()
        except OSError as error:
            log.warning("The socket has gone, and cannot be made anew: %s", error)
            return
        if before is not None:
            log.warning("The socket had gone: there is another one")
            loop.remove_reader(before)
            before.close()  # who waits there connects again
            self._listen()
            self._admit()
            self._deposits.listen_to(self._door.listener)

    def _accept(self) -> bool:
        """Take the connections that wait, so many at a time; return whether there was one."""
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
        """Without descriptors or memory for a connection, let those wait that come, for a while."""
        try:
            yield
        except OSError as error:
            if not is_want(error):
                raise
            log.warning("Nobody can connect for %g s: %s", ACCEPT_PAUSE_SECONDS, error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._door.listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._admit)

    def _admit(self) -> None:
        """Accept connections, unless it stops."""
        if not self._agent.stopping.is_set():
            asyncio.get_running_loop().add_reader(self._door.listener, self._accept)

    def _bound_log(self) -> None:
        """Keep the log below a size as long as it runs."""
        with contextlib.suppress(OSError):  # nothing that only tells ends anything
            daemon_log.bound(self._place.private / "agent.log")
        asyncio.get_running_loop().call_later(daemon_log.LOOK_SECONDS, self._bound_log)

    def _on_quiet(self) -> None:
        """There is no session: leave if it stays so."""
        if self._place.system:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.linger, self._leave_if_quiet)

    def _leave_if_quiet(self) -> None:
        """See Note [Leaving]."""
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
        # Who only watches may do that elsewhere.
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
    parser.add_argument("--keeper-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--system", action="store_true", help="serve all users; for root")
    parser.add_argument("--group", help="of those who may use the system daemon")
    options = parser.parse_args(arguments)
    if options.ready_fd >= 0 and os.fork() != 0:
        # The starter waits for this process, and the daemon is nobody's child to be reaped.
        os._exit(0)
    again, place = [sys.executable, "-m", "kernelproxy.agent"], None
    if options.system:
        again[1:1] = ["-P"]  # root's path has no place that a user chose
        again += ["--system", *(["--group", options.group] if options.group else [])]
        try:
            place = system_place(options.group)  # before anything looks for its directories
        except ControlError as error:
            _tell(options.ready_fd, str(error))
            return 1
    again.append("--keeper-fd")
    arbiter = _installed_arbiter()
    return run(options.ready_fd, again, options.keeper_fd, arbiter=arbiter, place=place)


def _installed_arbiter() -> Arbiter | None:
    """The one that another package brings (an entry point, which takes no arguments)."""
    for found in importlib.metadata.entry_points(group=ARBITERS):
        arbiter: Arbiter = found.load()()
        return arbiter
    return None


def run(
    ready_fd: int,
    command: Sequence[str],
    keeper_fd: int,
    settings: Settings | None = None,
    arbiter: Arbiter | None = None,
    place: Place | None = None,
) -> int:
    """Take the lock, or what a dead agent had, serve, and return the exit status.

    Parameters
    ----------
    ready_fd : int
        Where to say ``ready`` or why not, for who started it; -1: standard error.
    command : sequence of str
        What starts another agent like this one; the number of `keeper_fd` is put behind it.
    keeper_fd : int
        The connection to the keeper that started this one; -1: it is the first one.
    settings : Settings, optional
        By default those of the environment.
    arbiter : Arbiter, optional
        See `Agent`.
    place : Place, optional
        By default this user's own.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    for name in ("SING_SESSION", "SING_SOCKET"):
        os.environ.pop(name, None)
    _raise_fd_limit()
    os.chdir("/")
    try:
        place = place or own_place()
        estate = take_over(keeper_fd) if keeper_fd >= 0 else None
        if estate is not None:
            end_workers(estate.sessions)
        lock = _lock(place) if estate is None else estate.lock
        if place.system:
            for handler in logging.getLogger().handlers:
                handler.addFilter(Modesty())
        settings = replace(settings or Settings.from_environment(), system=place.system)
        asyncio.run(_serve(place, lock, settings, command, estate, arbiter, ready_fd))
    except SingError as error:
        _tell(ready_fd, str(error))
        return 1
    os.close(lock)
    return 0


async def _serve(
    place: Place,
    lock: int,
    settings: Settings,
    command: Sequence[str],
    estate: Estate | None,
    arbiter: Arbiter | None,
    ready_fd: int,
) -> None:
    await Daemon(place, lock, settings, command, estate, arbiter).serve(ready_fd)


def _lock(place: Place) -> int:
    """Take the lock that the one daemon of a place holds; one that leaves is waited for."""
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
            time.sleep(_LOCK_LOOK_SECONDS)  # one that leaves, or makes its socket anew
        else:
            return lock


def _tell(ready_fd: int, text: str) -> None:
    """Say something to who started this process; that it cannot be said ends nothing."""
    if ready_fd < 0:
        with contextlib.suppress(OSError):  # of a log on a disk that is full
            os.write(sys.stderr.fileno(), f"jupyter_sing daemon: {text}\n".encode())
        return
    with contextlib.suppress(BrokenPipeError):  # the starter did not wait so long
        os.write(ready_fd, f"{text}\n".encode())
    os.close(ready_fd)


def _raise_fd_limit() -> None:
    """Allow as many descriptors as the system lets us: a session takes about twelve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
