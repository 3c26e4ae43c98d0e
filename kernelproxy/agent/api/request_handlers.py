"""Handlers of the requests to the agent, for all connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.peer_limits import tame
from kernelproxy.agent.checkpoint.history import last_of_ended
from kernelproxy.agent.checkpoint.progress import (
    PROGRESS_SECONDS,
    CheckpointProgress,
    Note,
    both,
    with_progress,
)
from kernelproxy.agent.checkpoint.retention import KernelRun
from kernelproxy.agent.status import activity_store, session_status
from kernelproxy.agent.workers.crash_policy import is_want, pause
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, ProtocolError, SingError, StoreError
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import (
    ActivityReply,
    ActivityRequest,
    Attach,
    AwaitCheckpoint,
    Carried,
    Checkpoint,
    CheckpointOpened,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    CloseSession,
    DeleteCheckpoint,
    Done,
    Error,
    GetPolicy,
    LastCheckpoint,
    Listen,
    Message,
    MigrateRequest,
    OpenCheckpoint,
    OpenSession,
    Pin,
    PolicyApplied,
    PolicyReply,
    Prepare,
    Progress,
    Restore,
    RestoreReply,
    Resume,
    SessionReply,
    SetAutomatic,
    SetPolicy,
    SetPriority,
    StatusReply,
    StatusRequest,
    Stop,
    StopReply,
    Suspend,
    TakeOver,
    Tend,
    WatchRequest,
    Why,
    WhyReply,
)
from kernelproxy.common.protocol.views import DecisionView
from kernelproxy.common.readable import quoted
from kernelproxy.common.shared_memory import close_all
from kernelproxy.common.units import bytes_text
from kernelproxy.kernel_host import client

log = logging.getLogger(__name__)

_DECISIONS_MAX = 10_000
#: Time limit for the error to a peer that broke the protocol; it may not read it.
_LAST_WORD_SECONDS = 1.0
#: Longest pause between attempts to serve a kernel while descriptors or memory are short.
WANT_SECONDS_MAX = 8.0
#: How long the status of a notebook that asks for it itself waits for what it has issued.
SETTLE_SECONDS_MAX = 2.0


class RequestHandlers:
    """Answers the requests of all connections.

    Parameters
    ----------
    agent : Agent
        Carries the requests out. Its `on_quiet` is called when a connection ends and there is no
        session.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._stoppers: list[tuple[Channel, StopReply]] = []

    @property
    def watchers(self) -> int:
        """Number of connections that are subscriptions."""
        return len(self._agent.subscribers)

    async def converse(self, channel: Channel) -> None:
        """Answer the requests of one connection until it ends. Takes ownership of the channel."""
        try:
            pid, uid = channel.peer()
            while True:
                message, fds = await channel.receive()
                if isinstance(message, Checkpoint) and len(fds) == 2:
                    await self._checkpoint(channel, message, fds, uid)
                    continue
                request = expect((message, fds))
                try:
                    if isinstance(request, Attach):
                        session = self._agent.find(request.session, uid)
                        kernel, version = session.kernel, request.torch_version
                        return await _when_possible(partial(kernel.serve, channel, version))
                    if isinstance(request, Listen):
                        kernel = self._agent.find(request.session, uid).kernel
                        return await _when_possible(partial(kernel.listen, channel))
                    if isinstance(request, Tend):
                        managers = self._agent.find(request.session, uid).managers
                        return await managers.serve(channel)
                    if isinstance(request, OpenCheckpoint):
                        await self._open_checkpoint(channel, request, uid)
                        continue
                    if isinstance(request, AwaitCheckpoint):
                        session = self._agent.find(request.session, uid)
                        made = await session.maker.follow(request.name, channel)
                        await channel.send(CheckpointReply(made))
                        continue
                    if isinstance(request, Stop):
                        return await self._stop(channel, request, uid)
                    if isinstance(request, WatchRequest):
                        return await self._watch(channel, request, uid)
                    answering = self._answer(request, channel, pid, uid)
                    if self._may_be_withdrawn(request, pid):
                        answering = _unless_hung_up(channel, answering)
                    reply = await answering
                except ControlError as error:
                    reply = Error(error.message, error.reason)
                except StoreError as error:
                    reply = Error(str(error), error.reason)
                except SingError as error:
                    reply = Error(str(error), "failed")
                except OSError as error:  # such as a limit of the daemon, or a full disk
                    log.exception("%.200s failed", request)
                    reply = Error(_failure(error), "failed")
                except Exception:
                    log.exception("%.200s failed", request)
                    reply = Error(
                        "Something is wrong with the daemon: see its agent.log.", "failed"
                    )
                await channel.send(reply)
        except ProtocolError as error:
            log.warning("A connection is closed: %s", error)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    await channel.send(Error(str(error), "bad-request"))
        except OSError as error:
            log.debug("A connection ended: %s", error)
        finally:
            channel.close()
            if not self._agent.sessions:
                self._agent.on_quiet()

    async def _answer(self, request: Message, channel: Channel, pid: int, uid: int) -> Message:
        match request:
            case StatusRequest(asking):
                await self._learn_checkpoints()
                own = self._agent.sessions.get(asking)
                if own is not None and own.core.owner == uid:
                    await own.settle(SETTLE_SECONDS_MAX)
                return self.status(uid, asking)
            case OpenSession():
                return await self._agent.open(request, channel)
            case CloseSession(name, died):
                return await self._agent.close_session(name, uid, died=died)
            case Suspend(name, why):
                session = self._agent.find(name, uid, "suspend")
                by_kernel = pid == session.kernel.pid
                return SessionReply(
                    await session.commands.suspend(tame(why), uid, by_kernel=by_kernel)
                )
            case Resume(name):
                return SessionReply(await self._agent.find(name, uid, "resume").commands.resume())
            case MigrateRequest(name, device):
                session = self._agent.find(name, uid, "move")
                return SessionReply(await session.commands.migrate(self._agent.allocator(device)))
            case Pin(name, pinned):
                session = self._agent.find(name, uid, "pin")
                session.preferences.pin(pinned)
                return SessionReply(session_status.describe_session(session))
            case SetPriority(name, level):
                session = self._agent.find(name, uid)
                session.preferences.prefer(level)
                return SessionReply(session_status.describe_session(session))
            case Checkpoint(name):
                session = self._agent.find(name, uid, "save")
                return CheckpointReply(await session.requests.ask(request, channel))
            case Restore(name):
                session = self._agent.find(name, uid, "restore")
                return RestoreReply(await session.requests.restore(request, channel))
            case TakeOver(name, checkpoint):
                session = self._agent.find(name, uid)
                session.kernel.check_is(pid)
                return RestoreReply(
                    await with_progress(
                        channel,
                        None,
                        lambda note: self._agent.replacement.take_over(session, checkpoint, note),
                    )
                )
            case SetAutomatic(name, every, cells):
                session = self._agent.find(name, uid)
                session.core.check_usable()
                session.automatic.set_rule(every, cells)
                return SessionReply(session_status.describe_session(session))
            case LastCheckpoint(name, kernel_id, notebook):
                if kernel_id or notebook:
                    run = KernelRun(name, kernel_id, notebook)
                    found = await last_of_ended(run, uid, self._agent.checkpoints, self._agent.runs)
                    return CheckpointReply(found)
                return CheckpointReply(await self._agent.find(name, uid).history.last())
            case Carried(name):
                session = self._agent.find(name, uid)
                session.kernel.check_is(pid)
                session.requests.carried(request)
                return Done()
            case CheckpointsRequest():
                return CheckpointsReply(await self._agent.checkpoints.all(uid))
            case DeleteCheckpoint(name):
                await self._agent.checkpoints.delete(uid, name)
                for each in self._agent.sessions.values():
                    each.changed()
                return Done("It is deleted.")
            case GetPolicy():
                return PolicyReply(self._agent.arbiter.policy())
            case SetPolicy(policy, dry):
                self._check_master(uid)
                return PolicyApplied(**self._agent.arbiter.apply(policy, dry=dry))
            case ActivityRequest(since, resolution):
                read, directory, now = activity_store.read, paths.runtime_dir(), time.time()
                activity = await asyncio.to_thread(read, directory, since, now, resolution, uid)
                return ActivityReply(activity)
            case Why(name, count):
                return WhyReply(await self._why(name, count, uid))
            case Prepare(python, home):
                self._agent.prepare(python, self._agent.owner(channel, home, python))
                return Done("It begins.")
        raise ControlError(f"{request.wire_kind} is no request.", "bad-request")

    async def _checkpoint(
        self, channel: Channel, request: Checkpoint, fds: list[int], uid: int
    ) -> None:
        """Store a checkpoint that a kernel sends, and reply."""
        reply: Message
        try:
            session = self._agent.find(request.session, uid)
            session.kernel.check_is(channel.peer()[0])
            reply = CheckpointReply(await session.maker.make(request, fds, channel))
        except ControlError as error:
            reply = Error(error.message, error.reason)
        except SingError as error:
            reply = Error(str(error), "failed")
        finally:
            close_all(fds)
        await channel.send(reply)

    async def _open_checkpoint(self, channel: Channel, request: OpenCheckpoint, uid: int) -> None:
        """Send the content of a checkpoint, or what is needed of it in addition to its process."""
        why: str | None = ""
        if request.session and request.form != "namespace":
            session = self._agent.find(request.session, uid)
            why = await self._agent.replacement.obstacle(session, request.name)
        if why is not None and request.form == "process":
            nothing = f"Checkpoint {quoted(request.name)} has the variables, but not the process."
            raise ControlError(why or nothing, "unavailable")
        process, there = why is None, self._agent.sessions.get(request.session)
        mine = there is not None and there.core.owner == uid
        underway = there.requests.underway if there is not None and mine else CheckpointProgress()
        sessions = sum(each.core.owner == uid for each in self._agent.sessions.values())
        with underway.doing("restore", request.name) as far:

            def read(note: Note) -> Awaitable[tuple[CheckpointOpened, list[int]]]:
                return self._agent.checkpoints.open(
                    uid, request.name, both(far, note), process=process, sessions=sessions
                )

            reply, fds = await with_progress(channel, None, read)
        reply = replace(reply, why=why or "")
        try:
            await channel.send(reply, fds)
        finally:
            close_all(fds)
        if there is not None and mine:
            there.happened("restored", f"Restored checkpoint {request.name}.")
        pid = channel.peer()[0]
        for session in self._agent.sessions.values():
            if pid > 0 and session.kernel.pid == pid:
                session.history.note_use()

    def _may_be_withdrawn(self, request: Message, pid: int) -> bool:
        """Return True if a request is cancelled when its sender disconnects.

        A kernel's own `Checkpoint` and `Restore` are not: a kernel that is being saved closes its
        connections, and connects again later.
        """
        if isinstance(request, MigrateRequest | Resume | Suspend):
            return True
        if not isinstance(request, Checkpoint | Restore):
            return False
        return all(each.kernel.pid != pid for each in self._agent.sessions.values())

    async def _learn_checkpoints(self) -> None:
        """Load what the descriptions of sessions say about checkpoints."""
        if self._agent.cold.there:
            for owner in {each.core.owner for each in self._agent.sessions.values()}:
                await self._agent.checkpoints.learn(owner)

    async def _watch(self, channel: Channel, request: WatchRequest, uid: int) -> None:
        """Notify a subscriber of changes until it disconnects."""
        only = self._agent.find(request.session, uid) if request.session else None
        await self._learn_checkpoints()
        await self._agent.subscribers.serve(channel, only, self._agent.arbiter.sharing())

    async def _stop(self, channel: Channel, request: Stop, uid: int) -> None:
        """Begin to stop; the connection stays open for the reply, which `say_farewell` sends."""
        self._check_master(uid)
        reply = StopReply([], [])
        if request.checkpoint and not self._agent.stopping.is_set():
            reply = await self._put_away(channel)
        if not self._agent.settings.system:  # there, each user has a kernel host of their own
            await self._end_kernels()
        self._stoppers.append((channel, reply))
        self._agent.stopping.set()
        await asyncio.get_running_loop().create_future()  # until it is cancelled

    async def _end_kernels(self) -> None:
        """End the kernels that have outlived their Jupyter server: none would connect to them."""
        try:
            await asyncio.to_thread(client.end_kernels)
        except (ControlError, OSError) as error:
            log.warning("Kernels without a server were not ended: %s", error)

    async def _put_away(self, channel: Channel) -> StopReply:
        """Make checkpoints of all notebooks that would lose something.

        Ends early if another caller stops the daemon.

        Raises
        ------
        OSError
            If the caller has disconnected.
        """
        seconds, turn = self._agent.settings.stop_seconds, asyncio.Lock()
        making = {
            asyncio.create_task(each.automatic.before_end(seconds, turn))
            for each in self._agent.sessions.values()
        }
        others = asyncio.create_task(self._agent.stopping.wait())
        try:
            waiting: set[asyncio.Task[Any]] = set(making)
            while waiting and not others.done():
                done, _ = await asyncio.wait(
                    {*waiting, others},
                    timeout=PROGRESS_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting -= done
                await channel.send(Progress(len(making) - len(waiting), len(making)))
        finally:
            for task in (*making, others):
                task.cancel()
            ended = await asyncio.gather(*making, return_exceptions=True)
        found = [each for each in ended if not isinstance(each, BaseException)]
        return StopReply([n for n, _ in found if n], [why for _, why in found if why])

    async def _why(self, name: str, count: int, uid: int) -> list[DecisionView]:
        """Return the scheduler's decisions about a session.

        Users other than root and the daemon's own can only ask about their own open sessions.
        """
        if uid not in (os.getuid(), 0):
            name = self._agent.find(name, uid).id
        return await asyncio.to_thread(
            self._agent.arbiter.decisions, name, min(count, _DECISIONS_MAX)
        )

    def _check_master(self, uid: int) -> None:
        """Raise ControlError unless a user may make decisions that affect all users."""
        if uid not in (os.getuid(), 0):
            whose = "root" if self._agent.settings.system else "another user"
            raise ControlError(f"This daemon belongs to {whose}.", "not-allowed")

    def status(self, uid: int, asking: str = "") -> StatusReply:
        """Describe devices and sessions as a user may see them; `asking` as in `StatusRequest`."""
        there = [each for each in self._agent.sessions.values() if not each.device_state.closed]
        sessions = [
            session_status.shown(
                session_status.describe_session(e, asking=e.id == asking), e.core.owner, uid
            )
            for e in there
        ]
        devices = [
            session_status.describe_device(allocator, sessions)
            for allocator in self._agent.allocators.values()
        ]
        elsewhere = list(self._agent.elsewhere)
        return StatusReply(devices, sessions, self._agent.arbiter.sharing(), elsewhere)

    async def say_farewell(self) -> None:
        """Reply to the callers of `Stop` that everything has ended."""
        for channel, reply in self._stoppers:
            with contextlib.suppress(OSError):
                await channel.send(reply)


async def _when_possible(serve: Callable[[], Awaitable[None]]) -> None:
    """Serve a kernel as soon as there are descriptors and memory for it.

    A kernel that is refused instead would lose its device, and the state on it.
    """
    tries = 0
    while True:
        try:
            return await serve()
        except OSError as error:
            if not is_want(error):
                raise
            tries += 1
            log.warning("A kernel waits to join its session: %s", error.strerror)
            await asyncio.sleep(pause(tries, WANT_SECONDS_MAX))


def _failure(error: OSError) -> str:
    """Return what the system refused, and what to do where its own message does not say that."""
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return (
            f"The daemon may write files, and share memory, of {bytes_text(most)} at most: stop it "
            "(jupyter sing stop) and start it again under a higher limit (ulimit -f)."
        )
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}."


async def _unless_hung_up(channel: Channel, answering: Coroutine[None, None, Message]) -> Message:
    """Answer a request that may take long; cancel it if the caller disconnects.

    Raises
    ------
    ConnectionError
        If the caller has disconnected.
    """
    task, hanging_up = asyncio.create_task(answering), asyncio.create_task(channel.hung_up())
    try:
        await asyncio.wait({task, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionError("The other side closed the connection.")
        return task.result()
    finally:
        for each in (task, hanging_up):
            each.cancel()
        await asyncio.gather(task, hanging_up, return_exceptions=True)
