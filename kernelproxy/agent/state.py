"""The state of one session's device: a snapshot, the log after it, and the worker that has it.

Whatever happens to the worker, snapshot and log rebuild the state. Which of the two covers what:

| moment                                    | state is in                                      |
|-------------------------------------------|--------------------------------------------------|
| no snapshot yet                           | the log from position 0                          |
| a snapshot is being taken                 | the older snapshot and the log after that        |
| the agent has the new snapshot            | the same; the new one is complete, too           |
| the log below its position was given back | the new snapshot and the log after it            |
| the worker ended, died or hangs           | the newest snapshot and the log after it         |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kernelproxy.agent.recovery import Deaths, Verdict
from kernelproxy.agent.settings import Settings
from kernelproxy.agent.workers import Snapshot, Worker
from kernelproxy.agent.zygotes import Zygote
from kernelproxy.devices import Device
from kernelproxy.errors import InternalError, WorkerError
from kernelproxy.oplog import Presence, SessionMemory, close_all
from kernelproxy.protocol import Open

T = TypeVar("T")


class DeviceState:
    """Owns the shared memory, the newest snapshot and the worker of a session.

    One caller at a time (the session's lock); only `close` may come at any moment, and only
    after whoever else is in here was cancelled.
    """

    def __init__(self, session: str, device: Device, settings: Settings) -> None:
        self.memory = SessionMemory(settings.log_bytes)
        self.snapshot: Snapshot | None = None
        self.worker: Worker | None = None
        self.deaths = Deaths()
        #: The largest grant since the newest snapshot: what replaying the log may need.
        self.replay_grant = 0
        #: Whether worker and pages are gone.
        self.closed = False
        self._session, self._device, self._settings = session, device, settings
        self._epoch = 0
        self._chores: set[asyncio.Future[None]] = set()
        page = self.memory.agent
        page.device_kind = device.kind
        page.device_name = device.name
        page.threads = device.threads
        page.memory_total = page.memory_free = device.memory_total
        page.log_budget = settings.log_budget

    # ---------------------------------------------------------------- what the pages say

    @property
    def position(self) -> int:
        """Position of the newest snapshot; 0 without one."""
        return self.snapshot.position if self.snapshot else 0

    @property
    def drained(self) -> bool:
        """Whether everything in the log was executed."""
        return self.memory.worker.consumed >= self.memory.client.head

    @property
    def wants_memory(self) -> bool:
        """Whether the client waits for an answer to its wish for memory."""
        return self.memory.client.want_sequence != self.memory.agent.grant_sequence

    @property
    def idle(self) -> bool:
        """Whether no cell runs and nothing is left to execute or to answer."""
        running = self.memory.client.cells_running
        return not running and self.drained and not self.wants_memory

    @property
    def awaited(self) -> bool:
        """Whether the client cannot go on without a worker: it waits for an answer or for room."""
        client, agent = self.memory.client, self.memory.agent
        over_budget = client.head - agent.retained > agent.log_budget
        return client.answer_wanted > self.memory.worker.consumed or over_budget

    @property
    def active_ns(self) -> int:
        """CLOCK_MONOTONIC, in ns, of the last sign of use."""
        return max(self.memory.client.cell_changed_ns, self.memory.worker.active_ns)

    # ---------------------------------------------------------------- what the agent says

    def announce(self, presence: Presence, reason: str = "") -> None:
        """Tell the client whether there is a worker. Reads after this see what it wrote before."""
        page = self.memory.agent
        page.reason = reason
        page.presence = presence
        page.ring()

    def set_grant(self, grant: int, free: int) -> None:
        """Publish a grant (bytes), as the answer to the client's wish if it has one."""
        sequence = self.memory.client.want_sequence
        page = self.memory.agent
        page.memory_granted = grant
        page.memory_free = free
        page.grant_sequence = sequence
        page.ring()
        self.replay_grant = max(self.replay_grant, grant)

    def cut_grant(self, grant: int) -> int:
        """Lower the grant, though not below what is in use by now; return the new one.

        The client takes memory without asking: it notes what it uses and then looks at its grant
        again, we write the grant and then look at what it uses, and so one of both notices.
        """
        page, before = self.memory.agent, self.memory.agent.memory_granted
        # A worker that lags behind needs the grant of when its records were appended.
        if grant >= before or not self.drained:
            return before
        page.memory_granted = grant
        page.ring()
        used = self.memory.client.memory_used
        if used > grant:
            grant = min(before, used)
            page.memory_granted = grant
            page.ring()
        return grant

    # ---------------------------------------------------------------- the worker

    async def start_worker(self, zygote: Zygote, on_change: Callable[[], object]) -> None:
        """Fork a worker and let it execute the log from the newest snapshot on.

        Raises
        ------
        WorkerError
            If it does not come up; then none is left.
        """
        if self.worker is not None:
            raise InternalError("a session would have two workers")
        worker = await zygote.spawn(on_change)
        self._epoch += 1
        order = Open(
            session=self._session,
            device=self._device.torch_device,
            threads=self._device.threads,
            epoch=self._epoch,
            skip=list(self.deaths.skip),
            snapshot=self.snapshot is not None,
            gate=True,
        )
        fds = self.memory.worker_fds()
        try:
            with_snapshot = [*fds, self.snapshot.fd] if self.snapshot else fds
            await worker.open(order, with_snapshot, self._settings.snapshot_seconds)
        except WorkerError:
            await worker.kill()
            worker.close()
            raise
        except BaseException:
            worker.close()
            raise
        finally:
            close_all(fds)
        self.worker = worker

    async def save(self, seconds: float | None = None) -> None:
        """Take a snapshot and give back the log below it.

        Parameters
        ----------
        seconds : float, optional
            What it may take; by default until somebody is in a hurry, see `hurry`.

        Raises
        ------
        WorkerError
            If the worker cannot; see `Worker.broken` whether it is lost.
        """
        if self.worker is None:
            raise InternalError("a snapshot was asked of no worker")
        taken = await self.worker.snapshot(seconds)
        retained = self.memory.agent.retained
        if not retained <= taken.position <= retained + self.memory.log_bytes:
            taken.close()
            raise InternalError(f"a worker at {retained} sent a snapshot of {taken.position}")
        older, self.snapshot = self.snapshot, taken
        # Bytes below `retained` may be overwritten, so this comes before it is published.
        await self._off_loop(lambda: self.memory.free_log(retained, taken.position))
        page = self.memory.agent
        page.retained = taken.position
        page.snapshots += 1
        page.ring()
        self.replay_grant = page.memory_granted
        self.deaths.forget_before(taken.position)
        if older is not None:
            self._begin_off_loop(older.close)

    def hurry(self) -> None:
        """Somebody waits for the session: let a snapshot in the background take no longer."""
        if self.worker is not None:
            self.worker.hurry(self._settings.snapshot_seconds)

    async def unload(self, *, unless_busy: bool) -> bool:
        """End the worker, having saved what it has done.

        Parameters
        ----------
        unless_busy : bool
            Let it go on if there is something to do when the snapshot is there.

        Returns
        -------
        bool
            Whether it ended.

        Raises
        ------
        WorkerError
            If it refuses to take a snapshot; it goes on then. (One that hangs or dies meanwhile
            is ended all the same: the newest snapshot and the log have its state.)
        """
        worker = self.worker
        if worker is None:
            return True
        seconds = self._settings.order_seconds
        try:
            await worker.gate(False, seconds)
            # With a closed gate nothing below head is begun: drained stays drained.
            if not (self.drained and self.memory.worker.consumed == self.position):
                await self.save(self._settings.snapshot_seconds)
            if unless_busy and not self.idle:
                await worker.gate(True, seconds)
                return False
        except WorkerError:
            if not worker.broken:
                await worker.gate(True, seconds)
                raise
            if unless_busy:
                return False
        await worker.end(seconds)
        self.drop_worker()
        return True

    async def bury(self) -> tuple[Verdict, str | None]:
        """Note the end of the worker; return what to do, and what it found corrupt, if it did."""
        worker = self.worker
        if worker is None:
            raise InternalError("no worker died")
        corrupt = await worker.last_words()
        self.drop_worker()
        if corrupt is not None:
            return Verdict.FAIL, corrupt
        if worker.overdue:
            return Verdict.RETRY, None
        status = await worker.status()
        verdict = self.deaths.note(self.memory.worker.consumed, self.memory.client.head, status)
        return verdict, None

    def drop_worker(self) -> None:
        """Let go of the worker, which is dead or is killed by this."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    async def close(self) -> None:
        """Free everything."""
        if self.worker is not None:
            await self.worker.kill()
            self.drop_worker()
        self.closed = True
        await asyncio.gather(*self._chores, return_exceptions=True)
        if self.snapshot is not None:
            await self._off_loop(self.snapshot.close)
            self.snapshot = None
        await self._off_loop(self.memory.close)

    async def _off_loop(self, chore: Callable[[], None]) -> None:
        """Do what takes as long as the state is large (freeing memory) beside the loop.

        It ends even if the caller is cancelled, and `close` waits for it.
        """
        await asyncio.shield(self._begin_off_loop(chore))

    def _begin_off_loop(self, chore: Callable[[], None]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(None, chore)
        self._chores.add(future)
        future.add_done_callback(self._chores.discard)
        return future
