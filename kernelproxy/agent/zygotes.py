"""Zygotes: one process for each environment that has imported torch and forks workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kernelproxy import paths
from kernelproxy.agent.channel import Channel, close_fds
from kernelproxy.agent.settings import Settings
from kernelproxy.agent.workers import Worker
from kernelproxy.errors import ProtocolError, WorkerError
from kernelproxy.protocol import Error, Message, Spawn, Spawned, WorkerExited, ZygoteReady

log = logging.getLogger(__name__)


class _Fork(NamedTuple):
    """A worker that a zygote has forked; `ended` will be how it ended, None if nobody can tell."""

    pid: int
    pidfd: int
    ended: asyncio.Future[int | None]


class Zygote:
    """One zygote. Owns its process and channel until `close`.

    Parameters
    ----------
    python : str
        The interpreter of its environment.
    settings : Settings
    on_death : callable
        Called with it when it ends unasked, after it was ready.
    """

    def __init__(
        self, python: str, settings: Settings, on_death: Callable[[Zygote], object]
    ) -> None:
        self.python = python
        self._on_death = on_death
        self.ready: ZygoteReady | None = None
        self.dead = False
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._tokens = 0
        # Answers come in the order of the orders.
        self._spawns: deque[asyncio.Future[_Fork]] = deque()
        # How workers ended, by their number, until it is known.
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> ZygoteReady:
        """Start it and wait until it is ready.

        Raises
        ------
        WorkerError
            If the interpreter cannot be started, has no usable torch, or the native part cannot
            be built; the text says which.
        """
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            with theirs:
                # Off the loop: starting a process waits for its exec.
                self._process = await asyncio.to_thread(self._launch, theirs.fileno())
            async with asyncio.timeout(self._settings.zygote_seconds):
                message, fds = await self._channel.receive()
            close_fds(fds)
            if isinstance(message, Error):
                raise WorkerError(message.message)
            if not isinstance(message, ZygoteReady):
                raise WorkerError(f"The zygote of {self.python} said something else than ready.")
        except TimeoutError as error:
            seconds = self._settings.zygote_seconds
            raise WorkerError(f"{self.python} was not ready after {seconds:g} s.") from error
        except (OSError, ProtocolError) as error:
            raise WorkerError(f"{self.python} could not start workers ({error}).") from error
        self.ready = message
        self._reader = asyncio.create_task(self._read(self._channel), name=f"zygote {self.python}")
        return message

    def _launch(self, fd: int) -> subprocess.Popen[bytes]:
        bundle = str(paths.bundle_dir())
        environment = {k: v for k, v in os.environ.items() if k not in ("SING_SESSION",)}
        # The daemon's own way to this package comes first there; the zygote needs the same one.
        search = [bundle, *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, search)))
        # NVML, by which the agent numbers GPUs, knows this order only.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        return subprocess.Popen(
            [self.python, *self._settings.zygote_command, str(fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
            cwd=bundle,
            env=environment,
            start_new_session=True,
        )

    async def spawn(self, on_change: Callable[[], object]) -> Worker:
        """Fork a worker.

        Raises
        ------
        WorkerError
            If the zygote is dead, hangs, or cannot fork.
        """
        channel = self._channel
        if self.dead or channel is None:
            raise WorkerError("The zygote is gone.")
        ours, theirs = socket.socketpair()
        spawned: asyncio.Future[_Fork] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                self._tokens += 1
                self._spawns.append(spawned)
                await channel.send(Spawn(self._tokens), [theirs.fileno()])
            async with asyncio.timeout(self._settings.order_seconds):
                pid, pidfd, ended = await asyncio.shield(spawned)
        except BaseException as error:
            ours.close()
            spawned.add_done_callback(_close_unwanted)
            if isinstance(error, OSError):  # TimeoutError is one
                self.kill()
                raise WorkerError(f"The zygote of {self.python} does not answer.") from error
            raise
        return Worker(Channel(ours), pid, pidfd, ended, on_change)

    async def _read(self, channel: Channel) -> None:
        """Take what it says until it ends."""
        try:
            while True:
                self._take(*await channel.receive())
        except (OSError, ProtocolError) as error:
            log.warning("The zygote of %s ended: %s", self.python, error)
            self.kill()
            self._on_death(self)

    def _take(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, WorkerExited):
            how = f"signal {-message.status}" if message.status < 0 else f"status {message.status}"
            log.info("Worker %d ended with %s", message.pid, how)
            ended = self._ends.pop(message.pid, None)
            if ended is not None:
                ended.set_result(message.status)
        elif isinstance(message, Spawned) and self._spawns and len(fds) == 1:
            ends = self._ends[message.pid] = asyncio.get_running_loop().create_future()
            self._spawns.popleft().set_result(_Fork(message.pid, fds.pop(), ends))
        elif isinstance(message, Error) and self._spawns:
            self._spawns.popleft().set_exception(WorkerError(message.message))
        else:
            close_fds(fds)
            raise ProtocolError("A zygote said what it was not asked.")
        close_fds(fds)

    def kill(self) -> None:
        """End it by force; its workers, which end with it, are found dead one by one."""
        self.dead = True
        if self._process is not None:
            self._process.kill()
        while self._spawns:
            spawned = self._spawns.popleft()
            if not spawned.done():
                spawned.set_exception(WorkerError(f"The zygote of {self.python} ended."))
        while self._ends:
            self._ends.popitem()[1].set_result(None)

    async def close(self) -> None:
        """End and reap it; doing it twice is no error."""
        self.dead = True
        if self._reader is not None:
            self._reader.cancel()
        if self._channel is not None:
            self._channel.close()  # it ends at the end of its connection
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(_reap, process, self._settings.order_seconds)
        self.kill()


class Zygotes:
    """The zygotes of all environments, started at first need and again after their death.

    An environment is an interpreter and the torch it had when its zygote began: sessions from
    before an upgrade keep the zygote that they need.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._zygotes: dict[tuple[str, str], Zygote] = {}
        self._starting: dict[str, asyncio.Task[Zygote]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, python: str, torch_version: str | None = None) -> Zygote:
        """Return the zygote of an environment, starting it if need be.

        Parameters
        ----------
        python : str
            Path of the interpreter, with the links by which virtual environments are known.
        torch_version : str, optional
            The torch that the caller has; by default any.

        Raises
        ------
        WorkerError
            If it cannot be started, or its torch is another one.
        """
        python = os.path.abspath(python)
        for (known, version), zygote in list(self._zygotes.items()):
            if known == python and torch_version in (None, version) and not zygote.dead:
                return zygote
        if python not in self._starting:
            self._starting[python] = asyncio.create_task(self._start(python))
        # Shielded: others may wait for the same one.
        zygote = await asyncio.shield(self._starting[python])
        found = zygote.ready.torch_version if zygote.ready else None
        if torch_version not in (None, found):
            raise WorkerError(f"The kernel has torch {torch_version}, its environment {found}.")
        return zygote

    async def _start(self, python: str) -> Zygote:
        zygote = Zygote(python, self._settings, self._retire)
        try:
            ready = await zygote.start()
        except BaseException:
            await zygote.close()
            raise
        finally:
            del self._starting[python]
        self._zygotes[python, ready.torch_version] = zygote
        return zygote

    def retire_unused(self, used: set[str]) -> None:
        """End the zygotes of interpreters that are not among `used`."""
        pythons = {os.path.abspath(python) for python in used}
        for zygote in list(self._zygotes.values()):
            if zygote.python not in pythons:
                self._retire(zygote)

    def _retire(self, zygote: Zygote) -> None:
        """End a zygote (or reap a dead one); the next who needs it starts another."""
        self._zygotes = {key: each for key, each in self._zygotes.items() if each is not zygote}
        closing = asyncio.create_task(zygote.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all of them."""
        for task in list(self._starting.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, WorkerError):
                await task
        for zygote in list(self._zygotes.values()):
            self._retire(zygote)
        await asyncio.gather(*self._closing)


def _close_unwanted(spawned: asyncio.Future[_Fork]) -> None:
    """Let go of a worker that came after nobody waited for it: its connection has ended."""
    if not spawned.cancelled() and spawned.exception() is None:
        os.close(spawned.result().pidfd)


def _reap(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
