"""The agent: all sessions and devices of this host."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from kernelproxy.agent.api.memory_trim import give_back_memory
from kernelproxy.agent.api.peer_limits import check_count, check_request, tame, user_of
from kernelproxy.agent.api.scheduler_actions import SchedulerActions
from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog as CheckpointStore
from kernelproxy.agent.checkpoint.history import KernelRuns
from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.devices.device_health import DeviceHealth
from kernelproxy.agent.lifecycle.family import Families
from kernelproxy.agent.lifecycle.kernel_replacement import KernelReplacement
from kernelproxy.agent.lifecycle.saved_sessions import SavedSessions
from kernelproxy.agent.lifecycle.session import HostServices, Session
from kernelproxy.agent.process.image_dirs import ImageDirs
from kernelproxy.agent.process.sandbox_probe import SandboxProbe
from kernelproxy.agent.residency.spill import Spiller
from kernelproxy.agent.session.core import Identity
from kernelproxy.agent.session.preferences import RememberedPreferences
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill.host_memory import HostMemory
from kernelproxy.agent.spill.spill_store import SpillStore
from kernelproxy.agent.state.context_pool import ContextPool
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.status import activity_store
from kernelproxy.agent.status.activity_recorder import ActivityRecorder
from kernelproxy.agent.status.observer import StatusObserver
from kernelproxy.agent.status.subscribers import Subscribers
from kernelproxy.agent.supervisor.fdstore import RECORD_VERSION, FdStore, PersistedSession
from kernelproxy.agent.workers.crash_policy import is_want
from kernelproxy.agent.workers.seats import Seats
from kernelproxy.agent.workers.user_zygotes import UserZygotes
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, WorkerError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.ipc.peer import Owner, check_path
from kernelproxy.common.protocol import Done, OpenSession, OpenSessionReply, Prepare
from kernelproxy.common.readable import quoted
from kernelproxy.common.scheduler_api import Arbiter, UnrestrictedArbiter
from kernelproxy.devices import Device
from kernelproxy.devices.memory_meter import memory_meter

log = logging.getLogger(__name__)


class Agent:
    """Owns all sessions, devices and zygotes.

    Parameters
    ----------
    devices : sequence of Device
    settings : AgentSettings
    fdstore : FdStore
        Persists what the next agent needs to recover the sessions.
    on_quiet : callable
        Called when the last session closes, and when a connection ends while there is no session.
    arbiter : Arbiter, optional
        The scheduler; by default all sessions may execute at any time.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        settings: AgentSettings,
        fdstore: FdStore,
        on_quiet: Callable[[], object],
        arbiter: Arbiter | None = None,
    ) -> None:
        self.allocators = {
            each.id: DeviceAllocator(each, settings.step_of(each.memory_total), memory_meter(each))
            for each in devices
        }
        for allocator in self.allocators.values():
            allocator.allocators = list(self.allocators.values())
        self._contexts = {
            each.device.id: ContextPool(each.device, each.measured, each.ledger)
            for each in self.allocators.values()
            if each.measured.present and settings.context_pool
        }
        for name, pool in self._contexts.items():
            self.allocators[name].spare = pool
        self.elsewhere: Sequence[str] = ()  # see `StatusReply`
        self.sessions: dict[str, Session] = {}
        self._families = Families(self.sessions)
        self.stopping = asyncio.Event()
        self.settings, self._fdstore, self.on_quiet = settings, fdstore, on_quiet
        self.arbiter = arbiter or UnrestrictedArbiter()
        self._actions = SchedulerActions(self.arbiter, self.sessions, self.allocators)
        self.arbiter.begin(self._actions, {each.id: each.memory_total for each in devices})
        self._health = DeviceHealth(self.allocators, self._device_failed, self._device_healed)
        self.subscribers = Subscribers(self.sessions, self.allocators)
        self.recorder = ActivityRecorder(
            self.sessions, self.allocators, activity_store.ActivityStore(paths.runtime_dir())
        )
        self._households = UserZygotes(settings, self._on_compiling)
        mark = DaemonId(paths.runtime_dir())
        self._images = ImageDirs(paths.data_dir() / "processes", mark)
        quota, beside = settings.disk_quota, self._images.usage
        self.cold = cold = SpillStore(paths.data_dir() / "states", quota, mark, beside)
        self.checkpoints = CheckpointStore(cold.store)
        self._forms = SandboxProbe(None if settings.system else paths.runtime_dir())
        own = self._households.of(None)
        saved = SavedSessions(cold, settings, self._add, self._place)
        self.replacement = KernelReplacement(self.checkpoints, self._images, own, saved)
        self._host = HostMemory(settings.host_budget, settings.cold_after, cold, self._guests)
        self.runs = KernelRuns()
        self._remembered = RememberedPreferences(paths.runtime_dir() / "wanted.json")
        observer = StatusObserver(self.subscribers, self.recorder)
        self._services = HostServices(
            settings, self._host, self.checkpoints, self._images, self.runs, fdstore, self.arbiter,
            observer, self._contexts, Seats(),
        )  # fmt: skip
        self._tidying: asyncio.TimerHandle | None = None
        self._preparing: set[asyncio.Task[object]] = set()
        self._tidying_disk: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []  # the memory of GPUs
        self._began = False  # True once the activity record has begun

    # ---------------------------------------------------------------- sessions

    async def open(self, request: OpenSession, channel: Channel) -> OpenSessionReply:
        """Open a session for the caller, or return the one they have opened with the same key.

        Raises
        ------
        ControlError
            If the daemon is stopping, or the caller may not have the session, or not on that
            device.
        """
        pid, uid = channel.peer()
        owner = self.owner(channel, request.home, request.python)
        form, why = (None, "") if request.script else await self._forms.get()
        if self.stopping.is_set():
            raise ControlError("The daemon is stopping.", "stopping")
        for each in self.sessions.values():
            if each.core.request.key == request.key and each.core.owner == uid:
                return OpenSessionReply(each.id, form, why)
        if owner is not None and uid != 0:
            check_request(request, self._count(uid))
        request = replace(request, user=user_of(request.user, uid))
        if (parent := self._families.parent(request, uid, pid)) is not None:
            request = self._families.inherited(request, parent)
        allocator = self._choose(request.device)
        if request.script:
            self._check_admitted(request.user)
        name = secrets.token_hex(6)
        state = DeviceState(name, allocator.device, self.settings)
        session = self._add(name, request, uid, allocator, state, owner)
        session.kernel.watch_opener(pid)
        if before := self._remembered.take(uid, request.kernel_id):
            session.preferences.recover(before)
        elif parent is not None:
            session.preferences.inherit(parent.preferences)
        session.persist()
        log.info("Session %s (%s) on %s", name, tame(request.name), allocator.device.id)
        return OpenSessionReply(name, form, why)

    def check_ranks(self, request: Prepare, uid: int) -> None:
        """Check whether a program may have the sessions of its ranks.

        Raises
        ------
        ControlError
            As `open` for the last of them.
        """
        if self.settings.system and uid != 0:
            check_count(self._count(uid), request.ranks)
        self._check_admitted(user_of(request.user, uid))
        self._choose(request.device)

    def _count(self, uid: int) -> int:
        """Return the number of a user's sessions."""
        return sum(each.core.owner == uid for each in self.sessions.values())

    def _check_admitted(self, user: str) -> None:
        if why := self.arbiter.admits(user):
            raise ControlError(why, "not-allowed")

    def owner(self, channel: Channel, home: str, python: str) -> Owner | None:
        """Return the user as whom the caller's processes run; None: as the daemon's own user.

        Raises
        ------
        ControlError
            If `home` or `python` is not a valid path.
        """
        if not self.settings.system:
            return None
        check_path(python)
        return channel.owner().of_home(home)

    def _add(
        self,
        name: str,
        request: OpenSession,
        owner: int,
        allocator: DeviceAllocator,
        state: DeviceState,
        runs_as: Owner | None = None,
    ) -> Session:
        identity = Identity(name, request, owner, shared=self.settings.system)
        zygotes = self._households.of(runs_as)
        session = Session(identity, allocator, state, zygotes, self._services, self._forget)
        self.sessions[name] = session
        self.runs.began(name)
        self._families.added(session)
        self.recorder.opened(session)
        self.arbiter.opened(session.preferences.terms())
        session.changed()
        return session

    def persist(self) -> None:
        """Persist all sessions."""
        for session in self.sessions.values():
            session.persist()

    def begin(self) -> None:
        """Start background work. The sessions of a dead agent have been recovered before."""
        if not self._began:
            self.recorder.begin(kept=False)
        self.recorder.taken_over()
        self._forms.begin()
        self._health.begin()
        sessions = list(self.sessions)
        directories = [each.hibernation.directory for each in self.sessions.values()]
        kept = [path for path in directories if path is not None]

        def tidy() -> None:
            self._images.tidy(kept)
            self.cold.tidy(sessions)

        self._tidying_disk = asyncio.create_task(asyncio.to_thread(tidy))
        for allocator in self.allocators.values():
            allocator.measured.on_change = self.subscribers.note_devices
            if allocator.measured.present:
                self._watching.append(asyncio.create_task(allocator.measured.watch()))

    def adopt(self, persisted: Sequence[PersistedSession]) -> None:
        """Recover the sessions of an agent that died; end those that cannot be recovered.

        Raises
        ------
        OSError, MemoryError
            If descriptors or memory run out: no session is ended because of that.
        """
        self._began = True
        self.recorder.begin(kept=True)
        for each in persisted:
            with each:
                try:
                    self._adopt(each)
                except Exception as error:
                    if is_want(error):
                        raise
                    log.exception("Session %s cannot be taken over", each.session)
                    each.end(f"It did not outlive its daemon: {str(error).rstrip('.')}.")
                    if session := self.sessions.get(each.session):
                        session.close("It could not be taken over.")
                    else:
                        self._fdstore.drop(each.session)
        self._families.end_orphans()

    def _adopt(self, persisted: PersistedSession) -> None:
        record = persisted.record
        if record.get("version") != RECORD_VERSION:
            raise ControlError("jupyter_sing was changed meanwhile")
        if persisted.worker_remains:
            raise ControlError("its device process cannot be ended")
        allocator = self.allocators.get(record["device"])
        if allocator is None:
            raise ControlError(f"the device {record['device']} is gone")
        state = DeviceState.adopt(persisted, allocator.device, self.settings)
        request = OpenSession(**record["request"])
        runs_as = Owner.adopt(record["runs_as"]) if record.get("runs_as") else None
        if self.settings.system and (runs_as is None or runs_as.uid != record["owner"]):
            raise ControlError("the user of its processes is unknown")
        session = self._add(persisted.session, request, record["owner"], allocator, state, runs_as)
        session.recover(persisted)
        self.recorder.state_changed(session, recovered=True)

    def _choose(self, wanted: str | None) -> DeviceAllocator:
        """Return the wanted device, or the one with the fewest sessions, then the most memory."""
        if wanted is not None:
            return self.allocator(wanted)
        return min(
            self.allocators.values(),
            key=lambda each: (bool(each.failure), len(each.tenants), -each.ledger.free),
        )

    def _place(self, device: str, beside: DeviceAllocator) -> DeviceAllocator:
        """Return the device for a restored session: where it was, else as for a new one.

        On a device of another kind than `beside` it could not continue.
        """
        found = self.allocators.get(device)
        if found is None or found.failure:
            found = self._choose(None)
        return found if found.device.kind is beside.device.kind else beside

    def _device_failed(self, allocator: DeviceAllocator) -> None:
        self.arbiter.device_changed(allocator.device.id, failed=True)
        self._actions.leave(allocator)
        self._device_changed(allocator)

    def _device_healed(self, allocator: DeviceAllocator) -> None:
        self.arbiter.device_changed(allocator.device.id, failed=False)
        self._device_changed(allocator)

    def _device_changed(self, allocator: DeviceAllocator) -> None:
        for session in self.sessions.values():
            session.core.request_reconcile()

    def allocator(self, device: str) -> DeviceAllocator:
        """Find a device.

        Raises
        ------
        ControlError
            If there is none of that name.
        """
        if device not in self.allocators:
            known = ", ".join(self.allocators)
            raise ControlError(f"There is no device {device}, only {known}.", "unknown-device")
        return self.allocators[device]

    async def close_session(self, name: str, uid: int, *, died: bool) -> Done:
        """Close a session. Idempotent: succeeds if it is gone already.

        Raises
        ------
        ControlError
            See `find`.
        """
        try:
            session = self.find(name, uid)
        except ControlError as error:
            if error.reason != "unknown-session":
                raise
            self.runs.ended(name, died=died)  # the caller knows best whether its kernel died
            return Done("It is gone already.")
        ended = session.close("Closed on request.")
        self.runs.ended(session.id, died=died)
        await ended
        return Done("It is closed.")

    def find(self, name: str, uid: int, doing: str = "use") -> Session:
        """Find a session by id, unique prefix of one, or name; other users' sessions by id only.

        `doing`: verb of the intended action, for the error message.

        Raises
        ------
        ControlError
            If there is none, or several, or it belongs to another user.
        """
        found = [self.sessions[name]] if name in self.sessions else []
        if not found and name:
            there = [e for e in self.sessions.values() if uid in (e.core.owner, os.getuid(), 0)]
            found = [each for each in there if each.id.startswith(name)]
            found = found or [each for each in there if each.core.name == name]
            found = found or [e for e in self.sessions.values() if e.id.startswith(name)]
        if not found:
            raise ControlError(f"There is no session {quoted(name)}.", "unknown-session")
        if len(found) > 1:
            ids = ", ".join(each.id for each in found)
            raise ControlError(f"Several sessions match {quoted(name)}: {ids}.", "ambiguous")
        if uid not in (found[0].core.owner, os.getuid(), 0):
            owner = found[0].core.user
            raise ControlError(
                f"{name} belongs to {owner}: only {owner} or an admin can {doing} it.",
                "not-allowed",
            )
        return found[0]

    def _guests(self) -> list[Spiller]:
        return [each.spiller for each in self.sessions.values()]

    def _forget(self, session: Session) -> None:
        """Remove a session that has closed."""
        del self.sessions[session.id]
        self._families.closed(session)
        self.subscribers.note(session)
        self.recorder.closed(session)
        if session.core.kernel_id and session.preferences.anything:
            core = session.core
            self._remembered.keep(core.owner, core.kernel_id, session.preferences.record())
        self._tidy_later()
        if not self.sessions:
            self.on_quiet()

    # ---------------------------------------------------------------- environments

    def prepare(self, python: str, owner: Owner | None) -> None:
        """Start an environment's zygote in the background, so that its first session finds it."""
        task: asyncio.Task[object] = asyncio.create_task(self._households.of(owner).get(python))
        self._preparing.add(task)
        task.add_done_callback(self._prepared)

    def _on_compiling(self, python: str) -> None:
        """Notify the sessions of an environment that the progress of a compilation has changed."""
        for session in self.sessions.values():
            if os.path.abspath(session.core.python) == python:
                session.changed()

    def _tidy_later(self) -> None:
        """Schedule the removal of zygotes that no session uses: each has torch in memory.

        One timer serves all sessions that come and go meanwhile. A zygote that was used recently
        is checked again later.
        """
        if self._tidying is None:
            loop = asyncio.get_running_loop()
            self._tidying = loop.call_later(self.settings.linger, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        used = [(each.zygotes.owner, each.core.python) for each in self.sessions.values()]
        self._households.retire_unused(used)
        if self._households.unused(used):
            self._tidy_later()
        give_back_memory()

    def _prepared(self, task: asyncio.Task[object]) -> None:
        self._preparing.discard(task)
        self._tidy_later()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WorkerError):
            log.warning("Preparing: %s", error)  # `Attach` will report it to the kernel
        elif error is not None:
            log.error("Preparing failed", exc_info=error)

    async def close(self) -> None:
        """Close all sessions, and end all processes and tasks."""
        self.stopping.set()
        closing = [session.close("The daemon stopped.") for session in self.sessions.values()]
        await asyncio.gather(*closing, return_exceptions=True)
        await self.replacement.close()
        await self._health.close()
        await asyncio.gather(*(pool.close() for pool in self._contexts.values()))
        await self._actions.close()
        await self.arbiter.close()
        await self._host.close()
        await self._households.close()
        await self.recorder.close()
