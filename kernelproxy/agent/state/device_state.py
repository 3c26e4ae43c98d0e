"""The state of one session's device: a snapshot, the log after it, and the worker that holds it.

Whatever happens to the worker, snapshot and log suffice to rebuild the state. What each covers:

| moment                                    | state is in                                      |
|-------------------------------------------|--------------------------------------------------|
| no snapshot yet                           | the log from position 0                          |
| a snapshot is being taken                 | the older snapshot and the log after that        |
| the agent has the new snapshot            | the same; the new one is complete, too           |
| it is persisted (Note [Persisting])       | the new snapshot and the log after it            |
| the log below its position was freed      | the same                                         |
| the worker ended, died or hangs           | the newest snapshot and the log after it         |

A snapshot is a small file of tables, and the extents of the session's arena that they name. The
worker writes to the arena, but never to the extents of the newest snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill.spill_store import Job, SpillStore
from kernelproxy.agent.spill.spilled_state import SpilledState
from kernelproxy.agent.state.shared_pages import MemoryRequest, SharedPages
from kernelproxy.agent.supervisor.fdstore import PersistedSession
from kernelproxy.agent.workers.crash_policy import CrashPolicy, Verdict
from kernelproxy.agent.workers.seats import WorkerSource
from kernelproxy.agent.workers.snapshot import Departure, Snapshot
from kernelproxy.agent.workers.watchdog import Watchdog
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.common.errors import InternalError, StoreError, WorkerError
from kernelproxy.common.ipc.fd_validation import check_snapshot
from kernelproxy.common.protocol import EXIT_DEVICE_LOST, EXIT_NO_ROOM, DeviceLost, Open
from kernelproxy.common.shared_memory import (
    LAYOUT_VERSION,
    PAGE_BYTES,
    DeviceKind,
    Presence,
    SessionMemory,
    close_all,
)
from kernelproxy.devices import Device
from kernelproxy.storage.manifest import Label, Manifest

T = TypeVar("T")

#: Copy rate assumed until one was measured, on a copy of at least `MEASURED_BYTES_MIN`.
COPY_BYTES_PER_SECOND = 1e9
MEASURED_BYTES_MIN = 16 << 20
#: Seconds for which a move is expected once it is prepared, and the job has not settled after it.
EXPECTED_SECONDS, SETTLING_SECONDS = 10.0, 3.0


class DeviceState(SharedPages):
    """Owns the shared memory, the newest snapshot and the worker of a session.

    One caller at a time, which holds the session's lock. Only `close` may be called at any moment,
    after any other caller was cancelled.
    """

    def __init__(
        self,
        session: str,
        device: Device,
        settings: AgentSettings,
        memory: SessionMemory | None = None,
    ) -> None:
        super().__init__(memory or SessionMemory(settings.log_bytes), device)
        self.snapshot: Snapshot | None = None
        self.worker: Worker | None = None
        self.deaths = CrashPolicy()
        #: The largest grant since the newest snapshot: what replaying the log may need.
        self.replay_grant = 0
        self.disk = SpilledState(self.memory.arena_fd, lambda: self.persist())
        #: True if the log below `retained` is in no snapshot: only the worker has the state.
        self.unrecoverable = False
        #: Called when the content of `record` has changed, before any other process can see that.
        self.persist: Callable[[], object] = lambda: None
        #: Returns its user and name, for the titles of its workers.
        self.whose: Callable[[], str] = str
        #: Makes the other sessions on a device give back the memory that they keep there.
        self.make_room: Callable[[Device], Awaitable[None]] | None = None
        #: Returns True if a caller or another session waits for what this session has.
        self.others_wait: Callable[[], bool] = lambda: False
        self._watchdog = Watchdog(settings.still_seconds, settings.busy_seconds)
        self._watchdog.endless = lambda: self.unrecoverable or self.disk.arrivals_fd is not None
        self._cooling = False
        #: True if its last worker ended because its device had no memory to rebuild the state.
        self.without_room = False
        #: The newest token, and whether its worker may execute with it; see Note [Leases].
        self.lease = (0, False)
        self._spawned: list[Worker] = []
        self._session, self._settings = session, settings
        self._epoch = 0
        self._chores: set[asyncio.Future[None]] = set()
        self._copy_rate = COPY_BYTES_PER_SECOND
        self._busy_when_saved = self._moving_until = 0.0
        #: Cost of the newest snapshot for the session, in seconds of execution.
        self.save_cost = 0.0
        self.memory.agent.log_budget = settings.log_budget
        if memory is None:
            self.memory.agent.deterministic = int(settings.deterministic)

    # ---------------------------------------------------------------- outliving the agent

    def record(self) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """Return what `adopt` needs: a record in JSON, and named descriptors, still owned here."""
        memory, snapshot = self.memory, self.snapshot
        fds = list(zip(memory.NAMES, memory.fds, strict=True))
        if snapshot is not None:
            fds.append(("snapshot", snapshot.fd))
        self._spawned = [each for each in self._spawned if each.pidfd is not None]
        fds += [("process", each.pidfd) for each in self._spawned if each.pidfd is not None]
        record = {
            "snapshot": [snapshot.position, snapshot.bytes] if snapshot else None,
            "skip": self.deaths.skip,
            "starved": self.deaths.starved,
            "why": self.deaths.reasons(),
            "careful_until": self.deaths.careful_until,
            "replay_grant": self.replay_grant,
            "epoch": self._epoch,
            "forgone": self.unrecoverable,
            "cold": self.disk.alone,
            "stored": self.disk.stored is not None,
        }
        return record, fds

    @classmethod
    def adopt(
        cls, persisted: PersistedSession, device: Device, settings: AgentSettings
    ) -> DeviceState:
        """Recover the state from an agent that died. Its workers must have ended.

        Raises
        ------
        InternalError
            If the session cannot be rebuilt.
        """
        record = persisted.record["state"]
        saved, grant, epoch = record["snapshot"], record["replay_grant"], record["epoch"]
        if record["forgone"]:
            raise InternalError("it could not be kept recoverable")
        fds = [persisted.take(name) for name in SessionMemory.NAMES]
        memory = SessionMemory.adopt([fd for fd in fds if fd is not None])
        if memory.agent.retained > (saved[0] if saved else 0):
            memory.close()
            raise InternalError("what it did last is in no snapshot")
        state = cls(persisted.session, device, settings, memory)
        starved, why = record.get("starved", []), record.get("why", [])
        state.deaths.recover(record["skip"], starved, why, record.get("careful_until", 0))
        state.replay_grant, state._epoch, state.disk.alone = grant, epoch, record["cold"]
        snapshot = persisted.take("snapshot")
        if snapshot is not None:
            state.snapshot = Snapshot(snapshot, *saved)
            if state.position > memory.agent.retained:  # it died in the middle of `save`
                memory.free_log(memory.agent.retained, state.position)
                state._publish_snapshot()
        return state

    # ---------------------------------------------------------------- continuing from a checkpoint

    def lineage(self) -> dict[str, int]:
        """Return what `begin_cold` of another session needs to continue this one, in JSON."""
        return {
            "layout": LAYOUT_VERSION,
            "log_bytes": self.memory.log_bytes,
            "epoch": self._epoch,
            "grant": max(self.memory.client.memory_used, self.replay_grant),
        }

    def begin_cold(
        self, pages: Sequence[bytes], snapshot: Snapshot | None, stored: Manifest | None, epoch: int
    ) -> None:
        """Continue from another session: with its pages, and with its state only on disk.

        Parameters
        ----------
        pages : sequence of bytes
            Its client, worker and agent page, from when its log was empty.
        snapshot : Snapshot or None
            Takes ownership.
        stored : Manifest or None
            Manifest with the extents that `snapshot` names; owned by this session.
        epoch : int
            Epoch of its last worker, so that extents of later workers are not mistaken for theirs.

        Raises
        ------
        InternalError
            If its log was not empty.
        """
        memory, device, deterministic = self.memory, self.device, self.memory.agent.deterministic
        for page, content in zip((memory.client, memory.worker, memory.agent), pages, strict=True):
            page.memory[:PAGE_BYTES] = content
        position = snapshot.position if snapshot is not None else 0
        client, agent = memory.client, memory.agent
        if not client.head == memory.worker.consumed == position:
            raise InternalError("a session was suspended with work in its log")
        self.snapshot, self.disk.stored, self.disk.alone = snapshot, stored, stored is not None
        self._epoch = epoch
        self.settle_on(device)
        agent.retained, agent.log_budget = position, self._settings.log_budget
        agent.deterministic = deterministic
        agent.memory_granted = self.replay_grant = client.memory_used
        agent.grant_sequence = client.want_sequence
        # These are times of another clock: of another boot, or perhaps of another host.
        client.cell_changed_ns, memory.worker.active_ns = time.monotonic_ns(), 0
        self.forget_exactness()
        self.announce(Presence.ABSENT)

    # ---------------------------------------------------------------- where its state is

    @property
    def position(self) -> int:
        """Position of the newest snapshot; 0 without one."""
        return self.snapshot.position if self.snapshot else 0

    @property
    def saved(self) -> bool:
        """True if the newest snapshot has everything that was executed."""
        consumed = self.memory.worker.consumed
        return not self.unrecoverable and consumed == self.position

    @property
    def tail_seconds(self) -> float:
        """Seconds that replaying the log after the newest snapshot would take."""
        return max(0.0, self.busy_seconds - self._busy_when_saved)

    def copy_seconds(self, count: int) -> float:
        """Return the seconds to copy so many bytes of its state, by the measured rate."""
        return count / self._copy_rate

    def set_grant(self, grant: int, free: int, answered: MemoryRequest | None) -> None:
        """Publish a grant (bytes), and the request that it answers, if any.

        A request that came after the grant was decided waits for its own answer.
        """
        if grant > self.replay_grant:
            self.replay_grant = grant
            self.persist()
        page = self.memory.agent
        page.memory_granted = grant
        page.memory_free = min(free, max(0, self.memory_limit - grant))
        if answered is not None:
            if answered.bytes > grant:
                page.refused_sequence = answered.sequence
            page.grant_sequence = answered.sequence
        page.ring()

    # ---------------------------------------------------------------- the worker

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of its worker, and of others that are being prepared, or end."""
        return frozenset(each.pid for each in self._spawned if each.pidfd is not None)

    @property
    def may_share(self) -> bool:
        """True if its next worker may be in a process with others, see Note [Seats]."""
        return self.deaths.may_share(self.memory.worker.consumed)

    async def start_worker(self, zygote: WorkerSource, on_change: Callable[[], object]) -> None:
        """Fork a worker and let it execute the log from the newest snapshot on.

        Raises
        ------
        WorkerError
            If it does not start; then there is no worker.
        """
        if self.worker is not None:
            raise InternalError("a session would have two workers")
        self.worker = worker = await self.open_worker(zygote, on_change, self.device)
        with contextlib.suppress(OSError):  # it is dying, which is handled elsewhere
            await worker.set_lease(*self.lease)  # which may have changed meanwhile
        self._busy_when_saved = self.busy_seconds

    async def open_worker(
        self,
        zygote: WorkerSource,
        on_change: Callable[[], object],
        device: Device,
        *,
        prepare: bool = False,
    ) -> Worker:
        """Fork a worker that has the state of the newest snapshot.

        Parameters
        ----------
        zygote : WorkerSource
        on_change : callable
            See `Zygote.spawn`.
        device : Device
        prepare : bool
            True if it only loads the state, beside the worker that executes the session.

        Raises
        ------
        WorkerError
            If it does not start; then it is ended.
        """
        worker = await self.spawn_worker(zygote, on_change, device)
        await self.open_spawned(worker, device, prepare=prepare)
        return worker

    async def spawn_worker(
        self, zygote: WorkerSource, on_change: Callable[[], object], device: Device
    ) -> Worker:
        """Fork a worker that has no state yet; see `open_worker`."""
        worker = await zygote.spawn(on_change)
        worker.watchdog = self._watchdog
        if self.make_room is not None:
            worker.make_room = functools.partial(self.make_room, device)
        self._epoch += 1
        self._spawned.append(worker)
        self.persist()  # if this agent dies, the next one must know of this worker
        return worker

    async def open_spawned(
        self,
        worker: Worker,
        device: Device,
        *,
        prepare: bool = False,
        departure: Departure | None = None,
    ) -> None:
        """Give a worker the state of the newest snapshot, or of a departure; see `open_worker`."""
        newest = self.snapshot.fd if self.snapshot else None
        if departure is None:
            beside = {"snapshot": newest, "readiness": self.disk.arrivals_fd}
        else:
            beside = {
                "snapshot": departure.tables,
                "contents": departure.contents,
                "carried": departure.carried,
                "base": newest,
            }
        order = Open(
            session=self._session,
            device=device.torch_device,
            visible=device.visible,
            seat=worker.seat_secret,
            threads=device.threads,
            epoch=self._epoch,
            skip=list(self.deaths.skip),
            starved=list(self.deaths.starved),
            why=self.deaths.reasons(),
            gate=not prepare,
            prepare=prepare,
            careful_until=self.deaths.careful_until,
            title=f"sing: {self.whose()} {device.id}",
            **{name: fd is not None for name, fd in beside.items()},
        )
        fds = self.memory.worker_fds()
        try:
            sent = [*fds, *(fd for fd in beside.values() if fd is not None)]
            with worker.waiters_present(self.others_wait, bounded=False):
                await worker.open(order, sent, self._settings.snapshot_seconds)
        except WorkerError:
            await self._fell_with_others(worker)
            await worker.stop()
            worker.close()
            raise
        except BaseException:
            worker.close()
            raise
        finally:
            close_all(fds)
        worker.guard(lambda: self.worker is worker and self.leased and not self.drained)

    async def preallocate(self) -> None:
        """Take the memory for a snapshot, until `expedite`, while the worker executes.

        Raises WorkerError as `save`.
        """
        if self.worker is not None:
            await self.worker.preallocate()
            self._moving_until = time.monotonic() + EXPECTED_SECONDS

    @property
    def moving(self) -> bool:
        """True if it is prepared for a move, or has just moved."""
        return time.monotonic() < self._moving_until

    def may_depart(self, device: Device) -> bool:
        """True if `depart` may be called to move to a device.

        What the worker does not take along is computed again there if the new one is lost. So it
        needs an equal device, and all of the log since the newest snapshot.
        """
        whole = not self.unrecoverable and self.disk.arrivals_fd is None
        software = self.device.kind is DeviceKind.SOFTWARE
        return software and whole and not self.leased and self.device.computes_like(device)

    async def depart(self, known: int) -> Departure:
        """Save what a process lacks that has the contents in the file `known`.

        The gate is closed. Raises WorkerError as `save`.
        """
        if self.worker is None:
            raise InternalError("no worker can move")
        return await self.worker.depart(known, self._settings.snapshot_seconds)

    async def pass_on(self, there: Worker) -> None:
        """Make a prepared worker load the newest snapshot; raises WorkerError."""
        if self.snapshot is None:
            raise InternalError("there is no snapshot to pass on")
        await there.adopt(self.snapshot, self._settings.snapshot_seconds)

    @contextlib.asynccontextmanager
    async def gate_closed(self) -> AsyncIterator[None]:
        """Close the worker's gate, and open it at the end if the worker is still the session's.

        Raises
        ------
        WorkerError
            If the worker is lost, or its operator takes too long.
        """
        worker, seconds = self.worker, self._settings.order_seconds
        if worker is None:
            raise InternalError("no worker can stand still")
        await worker.gate(False, seconds)
        try:
            yield
        finally:
            if self.worker is worker and not worker.broken:
                await worker.gate(True, seconds)

    async def replay(self, until: int) -> None:
        """Let a worker from `replace_worker` execute; return when it has executed `until`.

        Raises
        ------
        WorkerError
            If it is lost.
        """
        if self.worker is None:
            raise InternalError("no worker can replay")
        await self.worker.replay(until, None)

    async def replace_worker(self, there: Worker, device: Device) -> None:
        """End the worker, and replace it by one that was prepared on another device.

        The new worker waits for the command to execute. What the old one has executed must be in
        the newest snapshot or in the log after it; the old one's gate is closed.
        """
        if self.worker is None:
            raise InternalError("a worker was to be replaced that is not there")
        # Two workers must never execute at the same time, not even for a moment.
        await self.worker.stop()
        self.drop_worker()
        self.worker, self._moving_until = there, time.monotonic() + SETTLING_SECONDS
        self.settle_on(device)
        with contextlib.suppress(OSError):  # it died, which is handled elsewhere
            await there.set_lease(*self.lease)  # which may have changed meanwhile
        self.memory.agent.ring()

    async def truncate_unsaved(self) -> None:
        """Free the part of the log that was executed, without a snapshot of its results.

        Until the next snapshot, only the worker has the state.
        """
        retained, consumed = self.memory.agent.retained, self.memory.worker.consumed
        if consumed <= retained:
            return
        self.unrecoverable = True
        self.persist()  # before anything is lost
        await self._off_loop(lambda: self.memory.free_log(retained, consumed))
        self.memory.agent.retained = consumed
        self.memory.agent.ring()

    async def save(
        self,
        seconds: float | None = None,
        *,
        stop: bool = False,
        patient: bool = False,
        frozen: Callable[[], object] | None = None,
    ) -> None:
        """Take a snapshot and free the log below it.

        Parameters
        ----------
        seconds : float, optional
            Time limit; by default there is none until `expedite` is called.
        stop : bool
            True if nothing is executed meanwhile; by default the worker continues.
        patient : bool
            True if it may begin later, when it disturbs the program least.
        frozen : callable, optional
            Called when the content of the snapshot is final.

        Raises
        ------
        WorkerError
            If the worker cannot take one; `Worker.broken` says whether it is lost.
        """
        if self.worker is None:
            raise InternalError("a snapshot was asked of no worker")
        busy = self.busy_seconds
        taken = await self.worker.snapshot(seconds, stop=stop, patient=patient, frozen=frozen)
        await self._keep(taken, self.worker, busy, stop=stop)

    async def _keep(
        self, taken: Snapshot, worker: Worker, busy: float, *, stop: bool = True
    ) -> None:
        """Make a snapshot the newest one; `busy`: seconds of work when it began."""
        if self._settings.system:
            await self._check(taken, worker)
        retained = self.memory.agent.retained
        if not retained <= taken.position <= retained + self.memory.log_bytes:
            taken.close()
            raise InternalError(f"a worker at {retained} sent a snapshot of {taken.position}")
        # The worker has waited for all of its state, so the arena does not need `stored` any more.
        with contextlib.suppress(StoreError):
            await self.disk.fetched()
        older, self.snapshot = self.snapshot, taken
        self.unrecoverable, self._busy_when_saved = False, busy
        # The thread that copies takes a core from those that compute, on any software device.
        software = self.device.kind is DeviceKind.SOFTWARE
        beside = taken.seconds / len(os.sched_getaffinity(0)) if software and not stop else 0.0
        self.save_cost = taken.stalled_ns / 1e9 + beside
        if taken.copied >= MEASURED_BYTES_MIN and taken.seconds > 0:
            self._copy_rate = taken.copied / taken.seconds
        self.persist()
        # Bytes below `retained` may be overwritten, so this comes before it is published.
        await self._off_loop(lambda: self.memory.free_log(retained, taken.position))
        self._publish_snapshot()
        self.replay_grant = self.memory.agent.memory_granted
        self.deaths.forget_before(taken.position)
        if older is not None:
            self._begin_off_loop(older.close)

    async def _check(self, taken: Snapshot, worker: Worker) -> None:
        """Check that a snapshot is one that the device can hold, before it is used.

        Raises
        ------
        WorkerError
            If it is not; then the worker is ended.
        """
        most = self.device.memory_total
        try:
            await asyncio.to_thread(check_snapshot, taken.fd, taken.position, most)
        except WorkerError:
            taken.close()
            await worker.kill()
            raise

    def _publish_snapshot(self) -> None:
        """Allow the client to overwrite the log below the snapshot, which has been freed."""
        page = self.memory.agent
        page.retained = self.position
        page.snapshots += 1
        page.ring()

    def expedite(self, to: Device | None = None) -> None:
        """Limit the time of a snapshot in the background, as others wait for the session.

        `to`: the device to which it is to move.
        """
        if self.worker is not None:
            departs = to is not None and self.worker.in_seat and self.may_depart(to)
            self.worker.expedite(self._settings.snapshot_seconds, departs=departs)

    async def unload(self, *, unless_busy: bool, waiters_present: bool = False) -> bool:
        """End the worker, after a snapshot of what it has done.

        Parameters
        ----------
        unless_busy : bool
            Let it continue if there is something to do when the snapshot is complete.
        waiters_present : bool
            True if others wait for that: then a worker that hangs is ended, see Note [Patience].

        Returns
        -------
        bool
            True if it ended.

        Raises
        ------
        WorkerError
            If it refuses to take a snapshot; then it continues. (A worker that hangs or dies
            meanwhile is ended all the same: the newest snapshot and the log have its state.)
        """
        worker = self.worker
        if worker is None:
            return True
        with worker.waiters_present(lambda: waiters_present, bounded=False):
            return await self._unload(worker, unless_busy=unless_busy)

    async def _unload(self, worker: Worker, *, unless_busy: bool) -> bool:
        seconds = self._settings.order_seconds
        try:
            await worker.gate(False, seconds)
            # With a closed gate nothing below head is begun: drained stays drained.
            if not (self.drained and self.saved):
                await self.save(self._settings.snapshot_seconds, stop=True)
            if unless_busy and not self.idle:
                await worker.gate(True, seconds)
                return False
            await worker.trim(self._settings.snapshot_seconds)
        except WorkerError:
            if not worker.broken:
                await worker.gate(True, seconds)
                raise
            if unless_busy or self.unrecoverable:
                return False
            await self._fell_with_others(worker)
            if worker.lost is not None:  # the next one is then careful at once
                await self._judge(worker)
        await worker.end(seconds)
        self.drop_worker()
        return True

    async def reap_worker(self) -> tuple[Verdict, str | None]:
        """Note the end of the worker; return what to do, and what it found corrupt, if it did."""
        worker = self.worker
        if worker is None:
            raise InternalError("no worker died")
        corrupt = await worker.last_words()
        fell = corrupt is None and await self._fell_with_others(worker)
        self.drop_worker()
        self.deaths.pause, self.without_room = 0.0, False
        if corrupt is not None:
            return Verdict.FAIL, corrupt
        if worker.overdue:
            return Verdict.RETRY, None
        if self.unrecoverable:
            return Verdict.FAIL, None
        if fell:
            return Verdict.RETRY, None
        return await self._judge(worker), None

    async def _fell_with_others(self, worker: Worker) -> bool:
        """Note the death of a worker with others in its process, and return True, if it is one."""
        fell = await worker.fell_with_others()
        if fell:
            consumed = self.memory.worker.consumed
            self.deaths.fell_with_others(consumed, suspect=worker.suspect)
        return fell

    async def _judge(self, worker: Worker) -> Verdict:
        """Note the death of a worker by its own doing, or by a signal."""
        status, lost = await worker.status(), worker.lost
        self.without_room = status == EXIT_NO_ROOM
        if status == EXIT_DEVICE_LOST and lost is None:
            lost = DeviceLost(0, "The device rejected all further work.", "")
        starved = status == -signal.SIGKILL and worker.starvation.happened()
        consumed, head = self.memory.worker.consumed, self.memory.client.head
        return self.deaths.note(
            consumed, head, status, starved=starved, lost=lost, without_room=self.without_room
        )

    def drop_worker(self) -> None:
        """Release the worker, which is dead or is ended by this."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    # ---------------------------------------------------------------- spilling, and its end

    def store(self, cold: SpillStore, label: Label) -> Job[Manifest]:
        """Begin to copy the newest snapshot to disk; there must be no worker."""
        if self.worker is not None or self.snapshot is None:
            raise InternalError("a state in use was to go to disk")
        return self.disk.store(cold, label, self.snapshot)

    async def rely_on_disk(self) -> None:
        """Make the disk the only copy, and free the arena's memory."""
        self.disk.rely_on_it()
        self._cooling = True
        try:
            await self._off_loop(self.memory.empty_arena)
        finally:
            self._cooling = False

    @property
    def leased(self) -> bool:
        """True if the scheduler lets its worker execute."""
        return self.lease[1]

    @property
    def cold(self) -> bool:
        """True if it is only on disk, and its memory is free."""
        return self.disk.alone and not self._cooling

    async def close(self) -> None:
        """End the worker and free everything."""
        if self.worker is not None:
            await self.worker.stop()
            self.drop_worker()
        self.closed = True
        await self.disk.close()
        await asyncio.gather(*self._chores, return_exceptions=True)
        if self.snapshot is not None:
            await self._off_loop(self.snapshot.close)
            self.snapshot = None
        await self._off_loop(self.memory.close)

    async def _off_loop(self, chore: Callable[[], None]) -> None:
        """Do off the loop what takes longer the larger the state is (freeing memory).

        It is completed even if the caller is cancelled, and `close` waits for it.
        """
        await asyncio.shield(self._begin_off_loop(chore))

    def _begin_off_loop(self, chore: Callable[[], None]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(None, chore)
        self._chores.add(future)
        future.add_done_callback(self._chores.discard)
        return future
