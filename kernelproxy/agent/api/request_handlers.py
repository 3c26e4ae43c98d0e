"""Handlers of the requests to the agent, for all connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial

from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.answers import Answers
from kernelproxy.agent.api.stopping import Stopping
from kernelproxy.agent.checkpoint.progress import (
    CheckpointProgress,
    Note,
    both,
    with_progress,
)
from kernelproxy.agent.workers.crash_policy import is_want, pause
from kernelproxy.common.errors import ControlError, ProtocolError, SingError, StoreError
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import (
    Attach,
    AwaitCheckpoint,
    Checkpoint,
    CheckpointOpened,
    CheckpointReply,
    Error,
    Listen,
    Message,
    MigrateRequest,
    OpenCheckpoint,
    Restore,
    Resume,
    Stop,
    Suspend,
    Tend,
    WatchRequest,
)
from kernelproxy.common.readable import quoted
from kernelproxy.common.shared_memory import close_all
from kernelproxy.common.units import bytes_text

log = logging.getLogger(__name__)

#: Time limit for the error to a peer that broke the protocol; it may not read it.
_LAST_WORD_SECONDS = 1.0
#: Longest pause between attempts to serve a kernel while descriptors or memory are short.
WANT_SECONDS_MAX = 8.0


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
        self._answers = Answers(agent)
        self._stopping = Stopping(agent)

    async def announce_end(self) -> None:
        """Reply to the callers of `Stop` that everything has ended."""
        await self._stopping.announce_end()

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
                        return await self._stopping.stop(channel, request, uid)
                    if isinstance(request, WatchRequest):
                        return await self._watch(channel, request, uid)
                    answering = self._answers.answer(request, channel, pid, uid)
                    if self._may_be_withdrawn(request, pid):
                        answering = _unless_disconnected(channel, answering)
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

    async def _watch(self, channel: Channel, request: WatchRequest, uid: int) -> None:
        """Notify a subscriber of changes until it disconnects."""
        only = self._agent.find(request.session, uid) if request.session else None
        await self._answers.learn_checkpoints()
        await self._agent.subscribers.serve(channel, only, self._agent.arbiter.sharing())


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


async def _unless_disconnected(
    channel: Channel, answering: Coroutine[None, None, Message]
) -> Message:
    """Answer a request that may take long; cancel it if the caller disconnects.

    Raises
    ------
    ConnectionError
        If the caller has disconnected.
    """
    task, disconnecting = (
        asyncio.create_task(answering),
        asyncio.create_task(channel.wait_disconnected()),
    )
    try:
        await asyncio.wait({task, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionError("The other side closed the connection.")
        return task.result()
    finally:
        for each in (task, disconnecting):
            each.cancel()
        await asyncio.gather(task, disconnecting, return_exceptions=True)
