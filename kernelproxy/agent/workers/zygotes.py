"""Zygotes: for each environment, a process that has imported torch and forks workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.workers.worker import MESSAGE_MAX, Worker
from kernelproxy.common import paths
from kernelproxy.common.errors import InternalError, ProtocolError, WorkerDiedError, WorkerError
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.ipc.fd_validation import Guard
from kernelproxy.common.ipc.peer import Owner, check_forked
from kernelproxy.common.protocol import (
    Compiled,
    Error,
    Message,
    Spawn,
    Spawned,
    WorkerExited,
    ZygoteReady,
)
from kernelproxy.native.libraries import Compiling
from kernelproxy.worker import process_title

log = logging.getLogger(__name__)

#: Environments of one user at a time, in a daemon that serves several users.
_KEPT_MAX = 8
#: Attempts to start a zygote that is killed before it is ready.
_STARTS_MAX = 10


#: Versions of torch, and counts of units, that are accepted from a zygote.
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}")
_UNITS_MAX = 9999


class _Fork(NamedTuple):
    """A worker that a zygote has forked; `ended`: its exit status, or None if that is not known."""

    pid: int
    pidfd: int
    ended: asyncio.Future[int | None]


class Zygote:
    """One zygote. Owns its process and channel until `close`.

    Parameters
    ----------
    python : str
        The interpreter of its environment.
    settings : AgentSettings
    on_death : callable
        Called with it when it ends unexpectedly, after it was ready.
    owner : Owner, optional
        User as whom it runs; by default as the daemon.
    on_compiling : callable
        Receives its progress with what it must compile before it is ready.
    """

    def __init__(
        self,
        python: str,
        settings: AgentSettings,
        on_death: Callable[[Zygote], object],
        owner: Owner | None = None,
        on_compiling: Callable[[Compiling], object] = lambda compiling: None,
    ) -> None:
        self.python, self._owner = python, owner
        self._on_death, self._on_compiling = on_death, on_compiling
        self.ready: ZygoteReady | None = None
        self.dead = False
        #: When it was last requested, or known to be used, in seconds of the monotonic clock.
        self.used = time.monotonic()
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._tokens = 0
        # Replies come in the order of the commands.
        self._spawns: deque[asyncio.Future[_Fork]] = deque()
        # Exit statuses of workers that are not known yet, by pid.
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    def _guard(self) -> Guard | None:
        """Return a guard for a connection to one of its user's processes."""
        return None if self._owner is None else Guard(self._owner.uid)

    async def start(self) -> ZygoteReady:
        """Start it and wait until it is ready.

        Raises
        ------
        WorkerError
            If the interpreter cannot be started, has no usable torch, or the native part cannot
            be built; the text says which.
        """
        try:
            ours, theirs = socket.socketpair()
            self._channel = Channel(ours, self._guard())
            # Off the loop, and not in a thread pool: starting a process waits for its exec, which
            # in a file system that the user serves may take any time.
            self._process = await _in_own_thread(
                self._launch, theirs, self._settings.zygote_seconds
            )
            async with asyncio.timeout(self._settings.zygote_seconds):
                message = await self._first_message(self._channel)
            if isinstance(message, Error):
                raise WorkerError(message.message[:MESSAGE_MAX])
            if not isinstance(message, ZygoteReady):
                raise WorkerError(f"The zygote of {self.python} said something else than ready.")
        except TimeoutError as error:
            seconds = self._settings.zygote_seconds
            raise WorkerError(f"{self.python} was not ready after {seconds:g} s.") from error
        except (OSError, ProtocolError, subprocess.SubprocessError) as error:
            why = f"{self.python} could not start workers ({error})."
            # A zygote that broke the protocol was not killed, and another one would do the same.
            if not isinstance(error, ProtocolError) and await self._was_killed():
                raise WorkerDiedError(why) from error
            raise WorkerError(why) from error
        self.ready = message
        self._reader = asyncio.create_task(self._read(self._channel), name=f"zygote {self.python}")
        return message

    async def _first_message(self, channel: Channel) -> Message:
        """Return its first message other than progress: that it is ready, or cannot be."""
        while True:
            message, fds = await channel.receive()
            close_fds(fds)
            if not isinstance(message, Compiled):
                return message
            if not _VERSION.fullmatch(message.torch):
                raise ProtocolError("A zygote compiles for something that is no torch.")
            if not 0 <= message.done <= message.total <= _UNITS_MAX:
                raise ProtocolError("A zygote has compiled more than there is.")
            what = f"GPU support for torch {message.torch}"
            self._on_compiling(Compiling(what, message.done, message.total))

    async def _was_killed(self) -> bool:
        """Wait for its end, and return True if a signal ended it; its connection has ended."""
        if self._process is None:
            return False
        seconds = self._settings.order_seconds
        await asyncio.to_thread(_reap, self._process, seconds)
        return bool(self._process.returncode and self._process.returncode < 0)

    def _launch(self, fd: int) -> subprocess.Popen[bytes]:
        owner, bundle = self._owner, str(paths.bundle_dir())
        environment = {k: v for k, v in os.environ.items() if k not in ("SING_SESSION",)}
        # First the path on which the daemon finds this package; the zygote needs the same one.
        search = [bundle, *environment.get("PYTHONPATH", "").split(os.pathsep)]
        beside: dict[str, Any] = {}
        if owner is not None:
            private = str(paths.runtime_dir())
            search = [each for each in search if not each.startswith(private)]
            bundle = str(paths.bundle_dir(paths.system_dir(), 0o755))
            search.insert(0, bundle)
            # Its user controls what it prints, which may be endless.
            beside = {**owner.process(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            environment = owner.environment()
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, search)))
        # NVML, by which the agent numbers GPUs, knows this order only.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # So that replaying the log gives the same bytes. Programs that call
        # `torch.use_deterministic_algorithms` need it, too, but their own variables are not here.
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        return subprocess.Popen(
            [self.python, *self._settings.zygote_command, str(fd), process_title.ROOM],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
            cwd=bundle,
            env=environment,
            start_new_session=True,
            **beside,
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
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # no descriptors: that is not the zygote's fault
            raise WorkerError(f"A worker could not be started: {error}.") from error
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
        return Worker(Channel(ours, self._guard()), pid, pidfd, ended, on_change)

    async def _read(self, channel: Channel) -> None:
        """Receive its messages until it ends."""
        try:
            while True:
                self._take(*await channel.receive())
        except (OSError, ProtocolError) as error:
            log.warning("The zygote of %s ended: %s", self.python, error)
            self.kill()
            self._on_death(self)

    def _take(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, WorkerExited):
            ended = self._ends.pop(message.pid, None)
            if ended is not None:
                status = message.status
                how = f"signal {-status}" if status < 0 else f"status {status}"
                log.info("Worker %d ended with %s", message.pid, how)
                ended.set_result(status)
        elif isinstance(message, Spawned) and self._spawns and len(fds) == 1:
            self._check_forked(fds[0], message.pid)
            ends = self._ends[message.pid] = asyncio.get_running_loop().create_future()
            self._spawns.popleft().set_result(_Fork(message.pid, fds.pop(), ends))
        elif isinstance(message, Error) and self._spawns:
            self._spawns.popleft().set_exception(WorkerError(message.message[:MESSAGE_MAX]))
        else:
            close_fds(fds)
            raise ProtocolError("A zygote said what it was not asked.")
        close_fds(fds)

    def _check_forked(self, pidfd: int, pid: int) -> None:
        """Raise ProtocolError if a process is not its worker: the agent would kill it as root."""
        if self._owner is None or self._process is None:
            return
        if not check_forked(pidfd, pid, self._process.pid, self._owner.uid):
            os.close(pidfd)
            raise ProtocolError("A zygote named a process that it has not forked.")

    def kill(self) -> None:
        """Kill it. Its workers end with it; the end of each one is detected separately."""
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
        """End and reap it. Idempotent."""
        self.dead = True
        if self._reader is not None:
            self._reader.cancel()
        if self._channel is not None:
            self._channel.close()  # it ends at the end of its connection
        if self._process is not None:
            process, self._process = self._process, None
            if self.ready is None:
                process.kill()  # it is not ready, and may do anything else
            await asyncio.to_thread(_reap, process, self._settings.order_seconds)
        self.kill()


class Zygotes:
    """The zygotes of all environments, started when first needed and again after their death.

    An environment is an interpreter and the torch that it had when its zygote started: sessions
    from before an upgrade keep the zygote that they need.

    Parameters
    ----------
    settings : AgentSettings
    owner : Owner, optional
        User as whom they run; by default as the daemon.
    crowd : callable
        Returns how many zygotes their user has, if that number is limited.
    on_change : callable
        Called with an interpreter when the result of `compiling` for it has changed.
    """

    def __init__(
        self,
        settings: AgentSettings,
        owner: Owner | None = None,
        crowd: Callable[[], int] = lambda: 0,
        on_change: Callable[[str], object] = lambda python: None,
    ) -> None:
        self._settings, self.owner, self._crowd = settings, owner, crowd
        self._on_change = on_change
        self._compiling: dict[str, Compiling] = {}
        self._zygotes: dict[tuple[str, str], Zygote] = {}
        self._starting: dict[str, asyncio.Task[Zygote]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, python: str, torch_version: str | None = None) -> Zygote:
        """Return the zygote of an environment; start it if necessary.

        Parameters
        ----------
        python : str
            Path of the interpreter; its links stay, as they identify virtual environments.
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
                zygote.used = time.monotonic()
                return zygote
        if python not in self._starting:
            if self._crowd() >= _KEPT_MAX:
                raise WorkerError(f"{_KEPT_MAX} environments are in use already: end a kernel.")
            self._starting[python] = asyncio.create_task(self._start(python))
        # Shielded: others may wait for the same one.
        zygote = await asyncio.shield(self._starting[python])
        found = zygote.ready.torch_version if zygote.ready else None
        if torch_version not in (None, found):
            raise WorkerError(f"The kernel has torch {torch_version}, its environment {found}.")
        return zygote

    async def _start(self, python: str) -> Zygote:
        try:
            zygote, ready = await self._started(python)
        finally:
            del self._starting[python]
            if self._compiling.pop(python, None) is not None:
                self._on_change(python)
        self._zygotes[python, ready.torch_version] = zygote
        return zygote

    def compiling(self, python: str) -> Compiling | None:
        """Return what is being compiled before workers of an environment can start, if anything."""
        return self._compiling.get(os.path.abspath(python))

    def _note(self, python: str, compiling: Compiling) -> None:
        self._compiling[python] = compiling
        self._on_change(python)

    async def _started(self, python: str) -> tuple[Zygote, ZygoteReady]:
        """Start a zygote; start another one if it is killed before it is ready."""
        for left in reversed(range(_STARTS_MAX)):
            note = functools.partial(self._note, python)
            zygote = Zygote(python, self._settings, self._retire, self.owner, note)
            try:
                return zygote, await zygote.start()
            except BaseException as error:
                await zygote.close()
                if not isinstance(error, WorkerDiedError) or not left:
                    raise
                log.warning("%s Starting another one.", error)
        raise InternalError("no zygote was started")

    @property
    def pythons(self) -> list[str]:
        """Interpreters of the zygotes that are ready."""
        return [zygote.python for zygote in self._zygotes.values()]

    def __len__(self) -> int:
        """Return the number of zygotes, including those that start or end."""
        return len(self._zygotes) + len(self._starting) + len(self._closing)

    def retire_unused(self, used: set[str]) -> None:
        """End the zygotes of interpreters that are not in `used`, and were not for a while."""
        pythons, now = {os.path.abspath(python) for python in used}, time.monotonic()
        for zygote in list(self._zygotes.values()):
            if zygote.python in pythons:
                zygote.used = now
            elif now - zygote.used >= self._settings.linger:
                self._retire(zygote)

    def _retire(self, zygote: Zygote) -> None:
        """End a zygote (or reap a dead one); the next session that needs it starts another."""
        self._zygotes = {key: each for key, each in self._zygotes.items() if each is not zygote}
        closing = asyncio.create_task(zygote.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all zygotes."""
        for task in list(self._starting.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, WorkerError):
                await task
        for zygote in list(self._zygotes.values()):
            self._retire(zygote)
        await asyncio.gather(*self._closing)


async def _in_own_thread(
    launch: Callable[[int], subprocess.Popen[bytes]], inherited: socket.socket, seconds: float
) -> subprocess.Popen[bytes]:
    """Start a process in a thread of its own, so that nothing else can wait behind it.

    Parameters
    ----------
    launch : callable
        Starts it; receives the number of a descriptor that the process inherits.
    inherited : socket.socket
        The socket with that descriptor. The thread takes ownership: even if the caller stops
        waiting, the number must not be reused before the process has inherited it.
    seconds : float
        Time limit.

    Raises
    ------
    OSError
        If it cannot be started, or (TimeoutError) it takes longer.
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()
    wanted: Future[bool] = Future()

    def run() -> None:
        process: subprocess.Popen[bytes] | None = None
        error: BaseException = WorkerError("It was not started.")
        try:
            with inherited:
                process = launch(inherited.fileno())
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, process, error)
        except RuntimeError:  # the loop is closed
            _discard(process)
        else:
            if not wanted.result():
                _discard(process)

    def settle(process: subprocess.Popen[bytes] | None, error: BaseException) -> None:
        wanted.set_result(not started.done())
        if started.done():
            return
        if process is None:
            started.set_exception(error)
        else:
            started.set_result(process)

    threading.Thread(target=run, name="sing-launch", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await started


def _discard(process: subprocess.Popen[bytes] | None) -> None:
    """End a process that was started too late."""
    if process is not None:
        process.kill()
        process.wait()


def _close_unwanted(spawned: asyncio.Future[_Fork]) -> None:
    """Release a worker that was forked after its caller gave up: its connection has ended."""
    if not spawned.cancelled() and spawned.exception() is None:
        os.close(spawned.result().pidfd)


def _reap(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
