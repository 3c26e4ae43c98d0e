"""Answers to the requests that have one reply, by kind of request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.peer_limits import check_master, tame
from kernelproxy.agent.checkpoint.history import last_of_ended
from kernelproxy.agent.checkpoint.progress import with_progress
from kernelproxy.agent.checkpoint.retention import KernelRun
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.session.job import JobRank
from kernelproxy.agent.status import activity_store, session_status
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import (
    ActivityReply,
    ActivityRequest,
    Carried,
    Checkpoint,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    CloseSession,
    DeleteCheckpoint,
    Done,
    GetPolicy,
    JoinJob,
    LastCheckpoint,
    Message,
    MigrateRequest,
    OpenSession,
    Pin,
    PolicyApplied,
    PolicyReply,
    Prepare,
    Restore,
    RestoreReply,
    Resume,
    SessionReply,
    SetAutomatic,
    SetDeterministic,
    SetPolicy,
    SetPriority,
    StatusReply,
    StatusRequest,
    Suspend,
    TakeOver,
    Why,
    WhyReply,
)

_DECISIONS_MAX = 10_000
#: How long the status of a notebook that asks for it itself waits for what it has issued.
SETTLE_SECONDS_MAX = 2.0


@dataclass(frozen=True)
class Caller:
    """Sender of a request.

    Parameters
    ----------
    channel : Channel
        Its connection.
    pid, uid : int
    """

    channel: Channel
    pid: int
    uid: int


class Answers:
    """Carries out the requests that have one reply.

    Parameters
    ----------
    agent : Agent
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._by_kind: Mapping[type[Message], Callable[[Any, Caller], Awaitable[Message]]] = {
            StatusRequest: self._status,
            OpenSession: self._open_session,
            JoinJob: self._join_job,
            CloseSession: self._close_session,
            Suspend: self._suspend,
            Resume: self._resume,
            MigrateRequest: self._migrate,
            Pin: self._pin,
            SetPriority: self._set_priority,
            SetDeterministic: self._set_deterministic,
            Checkpoint: self._checkpoint,
            Restore: self._restore,
            TakeOver: self._take_over,
            SetAutomatic: self._set_automatic,
            LastCheckpoint: self._last_checkpoint,
            Carried: self._carried,
            CheckpointsRequest: self._checkpoints,
            DeleteCheckpoint: self._delete_checkpoint,
            GetPolicy: self._get_policy,
            SetPolicy: self._set_policy,
            ActivityRequest: self._activity,
            Why: self._why,
            Prepare: self._prepare,
        }

    async def answer(self, request: Message, channel: Channel, pid: int, uid: int) -> Message:
        """Carry out a request, and return its reply.

        Raises
        ------
        ControlError
            ``bad-request``, if it is none of these; or what it raises.
        """
        answer = self._by_kind.get(type(request))
        if answer is None:
            raise ControlError(f"{request.wire_kind} is no request.", "bad-request")
        return await answer(request, Caller(channel, pid, uid))

    # ---------------------------------------------------------------- sessions

    async def _status(self, request: StatusRequest, caller: Caller) -> StatusReply:
        await self.learn_checkpoints()
        own = self._agent.sessions.get(request.session)
        if own is not None and own.core.owner == caller.uid:
            await own.settle(SETTLE_SECONDS_MAX)
        return self.status(caller.uid, request.session)

    async def learn_checkpoints(self) -> None:
        """Load what the descriptions of sessions say about checkpoints."""
        if self._agent.cold.there:
            for owner in {each.core.owner for each in self._agent.sessions.values()}:
                await self._agent.checkpoints.learn(owner)

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

    async def _open_session(self, request: OpenSession, caller: Caller) -> Message:
        return await self._agent.open(request, caller.channel)

    async def _join_job(self, request: JoinJob, caller: Caller) -> Done:
        """Note a session's job, by its own process, or by its owner."""
        session = self._agent.find(request.session, caller.uid)
        if caller.uid != session.core.owner and caller.pid != session.kernel.pid:
            raise ControlError("Only the session's owner can do that.", "not-allowed")
        session.membership.join(JobRank(request.job, request.rank, request.size))
        return Done()

    async def _close_session(self, request: CloseSession, caller: Caller) -> Message:
        return await self._agent.close_session(request.session, caller.uid, died=request.died)

    async def _suspend(self, request: Suspend, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid, "suspend")
        by_kernel = caller.pid == session.kernel.pid
        return SessionReply(
            await session.commands.suspend(tame(request.reason), caller.uid, by_kernel=by_kernel)
        )

    async def _resume(self, request: Resume, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid, "resume")
        return SessionReply(await session.commands.resume())

    async def _migrate(self, request: MigrateRequest, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid, "move")
        return SessionReply(await session.commands.migrate(self._agent.allocator(request.device)))

    async def _pin(self, request: Pin, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid, "pin")
        session.preferences.pin(request.pinned)
        return _described(session)

    async def _set_priority(self, request: SetPriority, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid)
        session.preferences.prefer(request.level)
        return _described(session)

    async def _set_deterministic(self, request: SetDeterministic, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid)
        session.preferences.set_deterministic(request.on)
        return _described(session)

    # ---------------------------------------------------------------- checkpoints

    async def _checkpoint(self, request: Checkpoint, caller: Caller) -> CheckpointReply:
        session = self._agent.find(request.session, caller.uid, "save")
        return CheckpointReply(await session.requests.ask(request, caller.channel))

    async def _restore(self, request: Restore, caller: Caller) -> RestoreReply:
        session = self._agent.find(request.session, caller.uid, "restore")
        return RestoreReply(await session.requests.restore(request, caller.channel))

    async def _take_over(self, request: TakeOver, caller: Caller) -> RestoreReply:
        session = self._agent.find(request.session, caller.uid)
        session.kernel.check_is(caller.pid)
        return RestoreReply(
            await with_progress(
                caller.channel,
                None,
                lambda note: self._agent.replacement.take_over(session, request.name, note),
            )
        )

    async def _set_automatic(self, request: SetAutomatic, caller: Caller) -> SessionReply:
        session = self._agent.find(request.session, caller.uid)
        session.core.check_usable()
        session.automatic.set_rule(request.every, request.cells)
        return _described(session)

    async def _last_checkpoint(self, request: LastCheckpoint, caller: Caller) -> CheckpointReply:
        agent = self._agent
        if request.kernel_id or request.notebook:
            run = KernelRun(request.session, request.kernel_id, request.notebook)
            found = await last_of_ended(run, caller.uid, agent.checkpoints, agent.runs)
            return CheckpointReply(found)
        return CheckpointReply(await agent.find(request.session, caller.uid).history.last())

    async def _carried(self, request: Carried, caller: Caller) -> Done:
        session = self._agent.find(request.session, caller.uid)
        session.kernel.check_is(caller.pid)
        session.requests.carried(request)
        return Done()

    async def _checkpoints(self, _: CheckpointsRequest, caller: Caller) -> CheckpointsReply:
        return CheckpointsReply(await self._agent.checkpoints.all(caller.uid))

    async def _delete_checkpoint(self, request: DeleteCheckpoint, caller: Caller) -> Done:
        await self._agent.checkpoints.delete(caller.uid, request.name)
        for each in self._agent.sessions.values():
            each.changed()
        return Done("It is deleted.")

    # ---------------------------------------------------------------- the scheduler, the daemon

    async def _get_policy(self, _: GetPolicy, __: Caller) -> PolicyReply:
        return PolicyReply(self._agent.arbiter.policy())

    async def _set_policy(self, request: SetPolicy, caller: Caller) -> PolicyApplied:
        check_master(caller.uid, system=self._agent.settings.system)
        return PolicyApplied(**self._agent.arbiter.apply(request.policy, dry=request.dry))

    async def _activity(self, request: ActivityRequest, caller: Caller) -> ActivityReply:
        read, directory, now = activity_store.read, paths.runtime_dir(), time.time()
        return ActivityReply(
            await asyncio.to_thread(
                read, directory, request.since, now, request.resolution, caller.uid
            )
        )

    async def _why(self, request: Why, caller: Caller) -> WhyReply:
        """Return the scheduler's decisions about a session.

        Users other than root and the daemon's own can only ask about their own open sessions.
        """
        name = request.session
        if caller.uid not in (os.getuid(), 0):
            name = self._agent.find(name, caller.uid).id
        count = min(request.count, _DECISIONS_MAX)
        return WhyReply(await asyncio.to_thread(self._agent.arbiter.decisions, name, count))

    async def _prepare(self, request: Prepare, caller: Caller) -> Done:
        owner = self._agent.owner(caller.channel, request.home, request.python)
        if request.ranks:
            self._agent.check_ranks(request, caller.uid)
        self._agent.prepare(request.python, owner)
        return Done("It begins.")


def _described(session: Session) -> SessionReply:
    return SessionReply(session_status.describe_session(session))
