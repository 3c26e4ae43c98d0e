"""The agent: all sessions and devices of this host, and the answers to requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from kernelproxy import paths
from kernelproxy.agent import activity, report
from kernelproxy.agent.arbiter import Arbiter, Everybody
from kernelproxy.agent.audience import Audience
from kernelproxy.agent.channel import Channel, expect
from kernelproxy.agent.checkpoints import Checkpoints as CheckpointStore
from kernelproxy.agent.chilling import Chilling
from kernelproxy.agent.chronicle import Chronicle
from kernelproxy.agent.cold import ColdStates
from kernelproxy.agent.deposits import RECORD_VERSION, Deposited, Deposits
from kernelproxy.agent.forms import Forms
from kernelproxy.agent.guests import check_request, tame
from kernelproxy.agent.hands import AgentHands
from kernelproxy.agent.hostmemory import HostMemory
from kernelproxy.agent.images import ImageDirectories
from kernelproxy.agent.mark import Mark
from kernelproxy.agent.owners import Owner, check_path
from kernelproxy.agent.past import Runs, last_of_ended
from kernelproxy.agent.progress import PROGRESS_SECONDS, Note, Underway, both, with_progress
from kernelproxy.agent.records import Run
from kernelproxy.agent.room import Room
from kernelproxy.agent.session import Session
from kernelproxy.agent.settings import Settings
from kernelproxy.agent.state import DeviceState
from kernelproxy.agent.takeover import TakeOvers
from kernelproxy.agent.tending import tend
from kernelproxy.agent.zygotes import Households
from kernelproxy.attendant import remote
from kernelproxy.devices import Device
from kernelproxy.errors import ControlError, ProtocolError, SingError, StoreError, WorkerError
from kernelproxy.oplog import close_all
from kernelproxy.protocol import (
    Activity,
    ActivityReply,
    Attach,
    AwaitCheckpoint,
    Carried,
    Checkpoint,
    CheckpointOpened,
    CheckpointReply,
    Checkpoints,
    CheckpointsReply,
    CloseSession,
    DeleteCheckpoint,
    Done,
    Error,
    GetPolicy,
    LastCheckpoint,
    Listen,
    Message,
    Migrate,
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
    SessionOpened,
    SessionReply,
    SetAutomatic,
    SetPolicy,
    SetPriority,
    Status,
    StatusReply,
    Stop,
    Stopped,
    Suspend,
    TakeOver,
    Tend,
    Watch,
    Why,
    WhyReply,
)

log = logging.getLogger(__name__)

USER_LENGTH_MAX = 200
_DECISIONS_MAX = 10_000


def user_of(claim: str, uid: int) -> str:
    """Say who a session is for.

    Parameters
    ----------
    claim : str
        Whom a front end has named; "": nobody.
    uid : int
        User number of that front end: whoever is not this daemon's own user, nor root, speaks for
        themselves.

    Raises
    ------
    ControlError
        If that is no name.
    """
    if not claim or uid not in (os.getuid(), 0):
        return report.user_name(uid)
    if len(claim) > USER_LENGTH_MAX or not claim.isprintable():
        raise ControlError("A user's name is one line of at most 200 characters.", "bad-request")
    return claim


class Agent:
    """Owns all sessions, rooms and zygotes.

    Parameters
    ----------
    devices : sequence of Device
    settings : Settings
    deposits : Deposits
        What sessions are made of is kept there.
    on_quiet : callable
        Called when the last session closes, and when a request leaves none behind.
    arbiter : Arbiter, optional
        By default all sessions may execute at any time.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        settings: Settings,
        deposits: Deposits,
        on_quiet: Callable[[], object],
        arbiter: Arbiter | None = None,
    ) -> None:
        self.rooms = {each.id: Room(each, settings.grant_step) for each in devices}
        for room in self.rooms.values():
            room.rooms = list(self.rooms.values())
        self.sessions: dict[str, Session] = {}
        self.stopping = asyncio.Event()
        self._settings, self._deposits, self._on_quiet = settings, deposits, on_quiet
        self._arbiter = arbiter or Everybody()
        self._hands = AgentHands(self._arbiter, self.sessions, self.rooms)
        self._arbiter.begin(self._hands, {each.id: each.memory_total for each in devices})
        self._audience = Audience(self.sessions, self.rooms)
        self._chronicle = Chronicle(self.sessions, self.rooms, activity.Record(paths.runtime_dir()))
        self._households = Households(settings)
        mark = Mark(paths.runtime_dir())
        self._images = ImageDirectories(paths.data_dir() / "processes", mark)
        quota, beside = settings.disk_quota, self._images.usage
        self._cold = cold = ColdStates(paths.data_dir() / "states", quota, mark, beside)
        self._checkpoints = CheckpointStore(cold.store)
        self._forms = Forms(None if settings.system else paths.runtime_dir())
        own = self._households.of(None)
        self._take_overs = TakeOvers(
            self._checkpoints, cold, self._images, own, settings, self._add
        )
        self._host = HostMemory(settings.host_memory, settings.cold_after, cold, self._guests)
        self._runs = Runs(self.sessions.keys())
        self._stoppers: list[tuple[Channel, Stopped]] = []
        self._tidying: asyncio.TimerHandle | None = None
        self._preparing: set[asyncio.Task[object]] = set()
        self._tidying_disk: asyncio.Task[None] | None = None
        self._began = False  # to keep the record

    @property
    def watchers(self) -> int:
        """How many conversations are with such as only watch."""
        return len(self._audience)

    # ---------------------------------------------------------------- conversations

    async def converse(self, channel: Channel) -> None:
        """Answer the requests of one connection until it ends. Owns the channel."""
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
                        session = self._find(request.session, uid)
                        return await session.kernel.serve(channel, request.torch_version)
                    if isinstance(request, Listen):
                        return await self._find(request.session, uid).kernel.listen(channel)
                    if isinstance(request, Tend):
                        return await tend(self._find(request.session, uid), channel)
                    if isinstance(request, OpenCheckpoint):
                        await self._open_checkpoint(channel, request, uid)
                        continue
                    if isinstance(request, AwaitCheckpoint):
                        session = self._find(request.session, uid)
                        made = await session.checkpointing.follow(request.name, channel)
                        await channel.send(CheckpointReply(made))
                        continue
                    if isinstance(request, Stop):
                        return await self._stop(channel, request, uid)
                    if isinstance(request, Watch):
                        return await self._watch(channel, request, uid)
                    reply = await self._answer(request, channel, pid, uid)
                except ControlError as error:
                    reply = Error(error.message, error.reason)
                except StoreError as error:
                    reply = Error(str(error), error.reason)
                except SingError as error:
                    reply = Error(str(error), "failed")
                except Exception:
                    log.exception("%.200s failed", request)
                    reply = Error(
                        "Something is wrong with the daemon: see its agent.log.", "failed"
                    )
                await channel.send(reply)
        except ProtocolError as error:
            log.warning("A connection is closed: %s", error)
        except OSError as error:
            log.debug("A connection ended: %s", error)
        finally:
            channel.close()
            if not self.sessions:
                self._on_quiet()

    async def _answer(self, request: Message, channel: Channel, pid: int, uid: int) -> Message:
        match request:
            case Status():
                await self._learn_checkpoints()
                return self._status(uid)
            case OpenSession():
                return await self._open(request, channel)
            case CloseSession(name, died):
                return await self._close(name, uid, died=died)
            case Suspend(name, why):
                return SessionReply(await self._find(name, uid).verbs.suspend(tame(why), pid))
            case Resume(name):
                return SessionReply(await self._find(name, uid).verbs.resume())
            case Migrate(name, device):
                session = self._find(name, uid)
                return SessionReply(await session.verbs.migrate(self._room(device)))
            case Pin(name, pinned):
                return SessionReply(self._find(name, uid).wanted.pin(pinned))
            case SetPriority(name, level):
                return SessionReply(self._find(name, uid).wanted.prefer(level))
            case Checkpoint(name):
                session = self._find(name, uid)
                return CheckpointReply(await session.checkpointing.ask(request, channel))
            case Restore(name):
                session = self._find(name, uid)
                return RestoreReply(await session.checkpointing.restore(request, channel))
            case TakeOver(name, checkpoint):
                session = self._find(name, uid)
                session.kernel.check_is(pid)
                return RestoreReply(
                    await with_progress(
                        channel,
                        None,
                        lambda note: self._take_overs.take_over(session, checkpoint, note),
                    )
                )
            case SetAutomatic(name, every, cells):
                session = self._find(name, uid)
                session.check_usable()
                session.automatic.set_rule(every, cells)
                return SessionReply(report.describe_session(session))
            case LastCheckpoint(name, kernel_id, notebook):
                if kernel_id or notebook:
                    run = Run(name, kernel_id, notebook)
                    found = await last_of_ended(run, uid, self._checkpoints, self._runs)
                    return CheckpointReply(found)
                return CheckpointReply(await self._find(name, uid).past.last())
            case Carried(name):
                session = self._find(name, uid)
                session.kernel.check_is(pid)
                session.checkpointing.carried(request)
                return Done()
            case Checkpoints():
                return CheckpointsReply(await self._checkpoints.all(uid))
            case DeleteCheckpoint(name):
                await self._checkpoints.delete(uid, name)
                for each in self.sessions.values():
                    each.changed()
                return Done("It is deleted.")
            case GetPolicy():
                return PolicyReply(self._arbiter.policy())
            case SetPolicy(policy, dry):
                self._check_master(uid)
                return PolicyApplied(**self._arbiter.apply(policy, dry=dry))
            case Activity(since, resolution):
                read, directory, now = activity.read, paths.runtime_dir(), time.time()
                found = await asyncio.to_thread(read, directory, since, now, resolution, uid)
                return ActivityReply(found)
            case Why(name, count):
                return WhyReply(await self._why(name, count, uid))
            case Prepare(python, home):
                self._prepare(python, self._owner(channel, home, python))
                return Done("It begins.")
        raise ControlError(f"{type(request).__name__} is no request.", "bad-request")

    async def _checkpoint(
        self, channel: Channel, request: Checkpoint, fds: list[int], uid: int
    ) -> None:
        """Store a checkpoint that a kernel hands over, and answer."""
        reply: Message
        try:
            session = self._find(request.session, uid)
            session.kernel.check_is(channel.peer()[0])
            reply = CheckpointReply(await session.checkpointing.make(request, fds, channel))
        except ControlError as error:
            reply = Error(error.message, error.reason)
        except SingError as error:
            reply = Error(str(error), "failed")
        finally:
            close_all(fds)
        await channel.send(reply)

    async def _open_checkpoint(self, channel: Channel, request: OpenCheckpoint, uid: int) -> None:
        """Hand out what a checkpoint holds, or what of it is needed beside its process."""
        why: str | None = ""
        if request.session and request.form != "namespace":
            session = self._find(request.session, uid)
            why = await self._take_overs.obstacle(session, request.name)
        if why is not None and request.form == "process":
            nothing = f"The checkpoint {request.name!r} holds no process."
            raise ControlError(why or nothing, "unavailable")
        process, there = why is None, self.sessions.get(request.session)
        mine = there is not None and there.owner == uid
        underway = there.checkpointing.underway if there is not None and mine else Underway()
        with underway.doing("restore", request.name) as far:

            def read(note: Note) -> Awaitable[tuple[CheckpointOpened, list[int]]]:
                return self._checkpoints.open(uid, request.name, both(far, note), process=process)

            reply, fds = await with_progress(channel, None, read)
        reply = replace(reply, why=why or "")
        try:
            await channel.send(reply, fds)
        finally:
            close_all(fds)
        if there is not None and mine:
            self._chronicle.happened(there, "restored", f"Checkpoint {request.name} was taken out.")
        pid = channel.peer()[0]
        for session in self.sessions.values():
            if pid > 0 and session.kernel.pid == pid:
                session.past.note_use()

    async def _learn_checkpoints(self) -> None:
        """Know all that descriptions of sessions say of checkpoints."""
        if self._cold.there:
            for owner in {each.owner for each in self.sessions.values()}:
                await self._checkpoints.learn(owner)

    async def _watch(self, channel: Channel, request: Watch, uid: int) -> None:
        """Tell who asks what changes, until he hangs up."""
        only = self._find(request.session, uid) if request.session else None
        await self._learn_checkpoints()
        await self._audience.serve(channel, only, self._arbiter.sharing())

    async def _stop(self, channel: Channel, request: Stop, uid: int) -> None:
        """Begin to stop, and keep the connection for the answer, which `close` sends."""
        self._check_master(uid)
        reply = Stopped([], [])
        if request.checkpoint and not self.stopping.is_set():
            reply = await self._put_away(channel)
        if not self._settings.system:  # their users' kernels have attendants of their own
            await self._end_kernels()
        self._stoppers.append((channel, reply))
        self.stopping.set()
        await asyncio.get_running_loop().create_future()  # until it is cancelled

    async def _end_kernels(self) -> None:
        """End kernels that live on without a server: nobody would ever ask for them."""
        try:
            await asyncio.to_thread(remote.end_kernels)
        except (ControlError, OSError) as error:
            log.warning("Kernels without a server were not ended: %s", error)

    async def _put_away(self, channel: Channel) -> Stopped:
        """Make checkpoints of all notebooks that have something to lose.

        Ends early if somebody else stops the daemon.

        Raises
        ------
        OSError
            If who asks has hung up.
        """
        seconds, turn = self._settings.stop_seconds, asyncio.Lock()
        making = {
            asyncio.create_task(each.automatic.before_end(seconds, turn))
            for each in self.sessions.values()
        }
        others = asyncio.create_task(self.stopping.wait())
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
        return Stopped([n for n, _ in found if n], [why for _, why in found if why])

    async def _why(self, name: str, count: int, uid: int) -> list[dict[str, Any]]:
        """What was decided about a session: nobody else's, so that one must be there."""
        if uid not in (os.getuid(), 0):
            name = self._find(name, uid).id
        return await asyncio.to_thread(self._arbiter.decisions, name, min(count, _DECISIONS_MAX))

    def _check_master(self, uid: int) -> None:
        """Raise ControlError unless a user may decide what concerns all."""
        if uid not in (os.getuid(), 0):
            whose = "root" if self._settings.system else "another user"
            raise ControlError(f"This daemon belongs to {whose}.", "not-allowed")

    def _status(self, uid: int) -> StatusReply:
        there = [each for each in self.sessions.values() if not each.device_state.closed]
        sessions = [report.shown(report.describe_session(e), e.owner, uid) for e in there]
        devices = [report.describe_device(room, sessions) for room in self.rooms.values()]
        return StatusReply(devices, sessions, self._arbiter.sharing())

    # ---------------------------------------------------------------- sessions

    async def _open(self, request: OpenSession, channel: Channel) -> SessionOpened:
        pid, uid = channel.peer()
        owner = self._owner(channel, request.home, request.python)
        form, why = (None, "") if request.script else await self._forms.get()
        if self.stopping.is_set():
            raise ControlError("The daemon is stopping.", "stopping")
        for each in self.sessions.values():
            if each.request.key == request.key and each.owner == uid:
                return SessionOpened(each.id, form, why)
        if owner is not None and uid != 0:
            check_request(request, sum(each.owner == uid for each in self.sessions.values()))
        room = self._choose(request.device)
        request = replace(request, user=user_of(request.user, uid))
        name = secrets.token_hex(6)
        state = DeviceState(name, room.device, self._settings)
        session = self._add(name, request, uid, room, state, owner)
        session.kernel.watch_opener(pid)
        session.deposit()
        log.info("Session %s (%s) on %s", name, request.name, room.device.id)
        return SessionOpened(name, form, why)

    def _owner(self, channel: Channel, home: str, python: str) -> Owner | None:
        """As whom processes of who asks run; None: as this one.

        Raises
        ------
        ControlError
            If what he says of them is no path.
        """
        if not self._settings.system:
            return None
        check_path(python)
        return channel.owner().of_home(home)

    def _add(
        self,
        name: str,
        request: OpenSession,
        owner: int,
        room: Room,
        state: DeviceState,
        runs_as: Owner | None = None,
    ) -> Session:
        session = Session(
            name, request, owner, room, state,
            self._households.of(runs_as), self._settings, self._host, self._checkpoints,
            self._images, self._runs, self._deposits, self._arbiter, self._audience,
            self._chronicle, self._forget,
        )  # fmt: skip
        self.sessions[name] = session
        self._chronicle.opened(session)
        self._arbiter.opened(session.terms())
        session.changed()
        return session

    def deposit(self) -> None:
        """Deposit all sessions."""
        for session in self.sessions.values():
            session.deposit()

    def begin(self) -> None:
        """Begin with what takes a while; the sessions of an agent that died are adopted by now."""
        if not self._began:
            self._chronicle.begin(kept=False)
        self._chronicle.taken_over()
        self._forms.begin()
        sessions = list(self.sessions)
        directories = [each.hibernation.directory for each in self.sessions.values()]
        kept = [path for path in directories if path is not None]

        def tidy() -> None:
            self._images.tidy(kept)
            self._cold.tidy(sessions)

        self._tidying_disk = asyncio.create_task(asyncio.to_thread(tidy))

    def adopt(self, deposited: Sequence[Deposited]) -> None:
        """Take over the sessions of an agent that died; where that is impossible, they end."""
        self._began = True
        self._chronicle.begin(kept=True)
        for each in deposited:
            with each:
                try:
                    self._adopt(each)
                except Exception as error:
                    log.exception("Session %s cannot be taken over", each.session)
                    each.end(f"It did not outlive its daemon: {str(error).rstrip('.')}.")
                    if session := self.sessions.get(each.session):
                        session.close("It could not be taken over.")
                    else:
                        self._deposits.drop(each.session)

    def _adopt(self, deposited: Deposited) -> None:
        record = deposited.record
        if record.get("version") != RECORD_VERSION:
            raise ControlError("jupyter_sing was changed meanwhile")
        if deposited.stuck:
            raise ControlError("its device process cannot be ended")
        room = self.rooms.get(record["device"])
        if room is None:
            raise ControlError(f"the device {record['device']} is gone")
        state = DeviceState.adopt(deposited, room.device, self._settings)
        request = OpenSession(**record["request"])
        runs_as = Owner.adopt(record["runs_as"]) if record.get("runs_as") else None
        if self._settings.system and (runs_as is None or runs_as.uid != record["owner"]):
            raise ControlError("nobody knows as whom it runs")
        session = self._add(deposited.session, request, record["owner"], room, state, runs_as)
        session.adopt(deposited)
        self._chronicle.became(session, adopted=True)

    def _choose(self, wanted: str | None) -> Room:
        """Take the wanted device, or the one with the fewest sessions and then the most room."""
        if wanted is not None:
            return self._room(wanted)
        return min(self.rooms.values(), key=lambda room: (len(room.tenants), -room.ledger.free))

    def _room(self, device: str) -> Room:
        if device not in self.rooms:
            known = ", ".join(self.rooms)
            raise ControlError(f"There is no device {device}, only {known}.", "unknown-device")
        return self.rooms[device]

    async def _close(self, name: str, uid: int, *, died: bool) -> Done:
        try:
            session = self._find(name, uid)
        except ControlError as error:
            if error.reason != "unknown-session":
                raise
            self._runs.ended(name, died=died)  # whoever closes it knows best
            return Done("It is gone already.")
        ended = session.close("Closed on request.")
        self._runs.ended(session.id, died=died)
        await ended
        return Done("It is closed.")

    def _find(self, name: str, uid: int) -> Session:
        """Find a session by id, unique prefix of one, or name.

        Raises
        ------
        ControlError
            If there is none, or several, or it belongs to another user.
        """
        found = [self.sessions[name]] if name in self.sessions else []
        if not found and name:
            there = [e for e in self.sessions.values() if uid in (e.owner, os.getuid(), 0)]
            found = [each for each in there if each.id.startswith(name)]
            found = found or [each for each in there if each.name == name]
        if not found:
            raise ControlError(f"There is no session {name!r}.", "unknown-session")
        if len(found) > 1:
            ids = ", ".join(each.id for each in found)
            raise ControlError(f"{name!r} may be any of the sessions {ids}.", "ambiguous")
        if uid not in (found[0].owner, os.getuid(), 0):
            raise ControlError(f"Session {name!r} belongs to another user.", "not-allowed")
        return found[0]

    def _guests(self) -> list[Chilling]:
        return [each.chilling for each in self.sessions.values()]

    def _forget(self, session: Session) -> None:
        """Take note that a session has closed."""
        del self.sessions[session.id]
        self._audience.note(session)
        self._chronicle.closed(session)
        self._tidy_later()
        if not self.sessions:
            self._on_quiet()

    # ---------------------------------------------------------------- environments

    def _prepare(self, python: str, owner: Owner | None) -> None:
        task: asyncio.Task[object] = asyncio.create_task(self._households.of(owner).get(python))
        self._preparing.add(task)
        task.add_done_callback(self._prepared)

    def _tidy_later(self) -> None:
        """Look after a while for zygotes that no session uses: each keeps a whole torch."""
        if self._tidying is not None:
            self._tidying.cancel()
        loop = asyncio.get_running_loop()
        self._tidying = loop.call_later(self._settings.linger, self._tidy)

    def _tidy(self) -> None:
        used = [(each.zygotes.owner, each.python) for each in self.sessions.values()]
        self._households.retire_unused(used)

    def _prepared(self, task: asyncio.Task[object]) -> None:
        self._preparing.discard(task)
        self._tidy_later()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WorkerError):
            log.warning("Preparing: %s", error)  # Attach will say it to whom it concerns
        elif error is not None:
            log.error("Preparing failed", exc_info=error)

    async def close(self) -> None:
        """End everything, then tell those who asked for it."""
        self.stopping.set()
        closing = [session.close("The daemon stopped.") for session in self.sessions.values()]
        await asyncio.gather(*closing, return_exceptions=True)
        await self._take_overs.close()
        await self._hands.close()
        await self._arbiter.close()
        await self._host.close()
        await self._households.close()
        await self._chronicle.close()
        for channel, reply in self._stoppers:
            with contextlib.suppress(OSError):
                await channel.send(reply)
