"""Notebook double on a machine double: a session with what the real parts of an agent use.

Its worker takes time, fails, and is late; users act on it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.devices.memory_grants import Neighbour
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.lifecycle.commands import Commands
from kernelproxy.agent.residency.migrate import Migrator
from kernelproxy.agent.session.states import State
from kernelproxy.common.errors import ControlError, InternalError, WorkerError
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.scheduler_api import Allowance, SessionDescription
from kernelproxy.common.shared_memory import Presence
from kernelproxy.devices import Device

if TYPE_CHECKING:
    from tests.doubles.scheduler.machine import Machine


class CellWorker:
    """Executes the cell of a notebook while it has a lease."""

    broken = False

    def __init__(self, notebook: MachineNotebook) -> None:
        self.notebook, self.since, self.seen = notebook, None, 0
        self.timer: asyncio.TimerHandle | None = None

    since: float | None

    async def set_lease(self, token: int, given: bool, within: float = 0.0) -> None:
        await asyncio.sleep(0.001)
        if self.broken or token < self.seen:
            return
        self.seen = token
        (self.go if given else self.stop)()

    async def take_lease(self, token: int, wanted: Callable[[], bool], within: float = 0.0) -> None:
        """Revoke the lease between two operators, which may take a while."""
        await asyncio.sleep(0.01 if self.notebook.machine.chance.random.random() < 0.9 else 3.0)
        await self.set_lease(token, False)

    def go(self) -> None:
        loop = asyncio.get_running_loop()
        if self.since is None:
            self.since = loop.time()
            self.timer = loop.call_later(self.notebook.demand.left, self.over)

    def stop(self) -> None:
        if self.since is not None and self.timer is not None:
            self.timer.cancel()
            done = asyncio.get_running_loop().time() - self.since
            self.notebook.demand.left = max(0.0, self.notebook.demand.left - done)
        self.since = None

    def over(self) -> None:
        self.stop()
        self.notebook.demand.left = 0.0
        self.notebook.look()

    def die(self) -> None:
        self.stop()
        self.broken = True
        self.notebook.look()


class MemoryMonitor:
    """Monitor double that measures memory only."""

    def __init__(self, notebook: MachineNotebook) -> None:
        self.notebook, self.memory = notebook, notebook.memory

    def begin(self) -> None:
        pass

    def measure(self) -> None:
        self.notebook.arbiter.measured(self.notebook.id, self.memory, 0.0)

    def end(self) -> None:
        pass


class NotebookState:
    """State of a notebook on a device."""

    def __init__(self, notebook: MachineNotebook) -> None:
        self.notebook, self.device = notebook, notebook.allocator.device
        self.worker: CellWorker | None = None
        self.position, self.lease = int(notebook.used), (0, False)
        agent = SimpleNamespace(presence=Presence.ABSENT, ring=lambda: None)
        client = SimpleNamespace(memory_used=notebook.memory, cell_changed_ns=0, head=0)
        self.memory = SimpleNamespace(agent=agent, client=client)
        self.memory_request, self.wants_memory = None, False

    @property
    def idle(self) -> bool:
        return not self.notebook.demand.left

    def announce(self, presence: Presence, reason: str = "") -> None:
        self.memory.agent.presence = presence

    def expedite(self, _: object = None) -> None:
        pass

    def settle_on(self, device: Device) -> None:
        self.device = device


class NotebookDemand:
    """Demand of a notebook for a worker."""

    def __init__(self) -> None:
        self.left = 0.0  # seconds that its cell still has to execute
        self.needed = self.held_off = False

    def wants_worker(self) -> bool:
        return (self.needed or self.left > 0.0) and not self.held_off


class MachineNotebook:
    """Session double, with what the real parts of an agent use."""

    shared = script = False
    python, kernel = "python", SimpleNamespace(torch_version="2", pid=1)
    awaited = False
    memory_limit, used, owner = 1 << 60, 0, 1
    #: Job that it is a rank of: its name, the number of the rank, and that of all ranks.
    rank: tuple[str, int, int] | None = None
    observed = SimpleNamespace(suspend_failure="")

    def __init__(
        self,
        machine: Machine,
        name: str,
        user: str,
        memory: int,
        allocator: DeviceAllocator,
        bound: bool,
    ) -> None:
        self.machine, self.id, self.name, self.user = machine, name, name, user
        self.memory, self.allocator, self.bound = memory, allocator, bound
        self.demand, self.used = NotebookDemand(), False
        self.begin(pinned=False)

    @property
    def tenant(self) -> Any:
        """Itself, which stands for the parts of a session, too."""
        return self

    core = tenant

    def begin(self, *, pinned: bool) -> None:
        """Register with the current agent."""
        self.arbiter = self.machine.controller
        self.preferences = SimpleNamespace(pinned=pinned)
        self.closing, self.claims = False, 0
        self.demand.held_off = self.demand.needed = False
        self.state = State.IDLE
        self.device_state = NotebookState(self)
        self.lock, self.looks = asyncio.Lock(), asyncio.Event()
        me: Any = self
        idle: Any = SimpleNamespace(drained_for=lambda: 0.0)
        self.lease = DeviceLease(me, me.device_state, me.demand, idle, self.arbiter)
        self.lease.monitor = MemoryMonitor(self)  # type: ignore[assignment]
        migrator = Migrator(me, me.device_state, self.lease, me, me)
        self.commands = Commands(
            me, me.device_state, me.demand, me, me, migrator, me, self.describe
        )
        self.allocator.tenants[self.id] = self.tenant
        self.attending = asyncio.create_task(self._attend())
        self.arbiter.opened(self.terms())
        if self.rank is not None:
            self.arbiter.joined(self.id, *self.rank)

    def join(self, job: str, rank: int, size: int) -> None:
        """Become a rank of a job, also for later agents."""
        self.rank = job, rank, size
        self.arbiter.joined(self.id, job, rank, size)

    def terms(self) -> SessionDescription:
        return SessionDescription(
            self.id, self.name, 1, self.allocator.device.id, self.memory, self.bound, self.user,
            self.preferences.pinned,
        )  # fmt: skip

    # Actions of users.

    def run(self, seconds: float) -> None:
        """Run a cell."""
        self.demand.left, self.used = self.demand.left + seconds, True
        worker = self.device_state.worker
        if worker is not None and worker.since is not None:
            worker.stop()
            worker.go()
        self.demand.held_off = False
        self.look()

    def pin(self, pinned: bool) -> None:
        self.preferences.pinned = pinned
        self.arbiter.changed(self.terms())
        self.look()

    async def close(self) -> None:
        """Close the session, as when its kernel ends."""
        self.closing = True
        if self.device_state.worker is not None:
            self.device_state.worker.die()
        self.lease.close()
        tasks = [self.attending, *self.commands.running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self.lock:
            self.allocator.leave_queue(self.tenant)
            del self.allocator.tenants[self.id]
            self.allocator.release(self.tenant)
        self.demand.left = 0.0
        self.machine.notebooks.pop(self.id, None)

    # Calls of the agent.

    def look(self) -> None:
        self.looks.set()

    request_reconcile = look

    def describe(self) -> SessionView:
        return cast(SessionView, {})  # no answer is looked at

    def persist(self) -> None:
        pass

    def note_state(self) -> None:
        pass

    def happened(self, kind: str, text: str) -> None:
        pass

    def allow(self, allowance: Allowance) -> None:
        assert allowance.tier

    def fail(self, why: str) -> None:
        raise AssertionError(why)

    def check_usable(self) -> None:
        if self.closing:
            raise ControlError("It has ended.", "ended")

    def set_state(self, state: State, reason: str) -> None:
        self.state = state

    def suspended(self, reason: str) -> None:
        self._off()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        self.claims += 1
        try:
            async with self.lock:
                yield
        except ControlError:
            raise
        except ValueError as error:  # a real session ends on it; here only the error is answered
            raise InternalError(str(error)) from error
        finally:
            self.claims -= 1
            if not self.claims:
                self.allocator.decided(self.tenant)

    async def run_granting(self, work: Any) -> Any:
        return await work

    async def on(self, device: Device) -> None:
        await self.machine.chance.act(0.01)

    async def move(self, target: Device, check: Callable[[], object]) -> None:
        """Stand in for `migration.migrate`."""
        await self.machine.chance.act(0.2)
        worker = self.device_state.worker
        assert worker is not None
        if worker.broken:
            raise WorkerError("It died.")
        worker.stop()
        try:
            check()
            await self.machine.chance.act(0.01)
        except BaseException:
            if self.lease.held:
                worker = self.device_state.worker
                assert worker is not None
                if not worker.broken:
                    worker.go()
            raise
        self.device_state.worker, self.device_state.device = CellWorker(self), target

    # Memory.

    @property
    def kept(self) -> int:
        return self.allocator.ledger.of(self.id) if self.preferences.pinned else 0

    @property
    def lock_taken(self) -> bool:
        return False

    def cut_grant(self, grant: int) -> int:
        return 0

    def as_neighbour(self) -> Neighbour | None:
        worker, granted = self.device_state.worker, self.allocator.ledger.of(self.id)
        if worker is None or worker.broken or self.claims or self.closing:
            return None
        stays = self.preferences.pinned or (self.lease.held and worker.since is not None)
        return Neighbour(self.id, granted, granted, None if stays else 0.0)

    async def suspend_for(self, other: str) -> bool:
        async with self.exclusive():
            return await self._suspend(unless_busy=True)

    async def evict(self, device: str, reason: str) -> bool:
        async with self.exclusive():
            if self.allocator.device.id != device:
                return False
            if self.device_state.worker is None:
                self.arbiter.evicted(self.id, device)
                return True
            return not self.lease.held and await self._suspend(unless_busy=True)

    async def suspend(self) -> None:
        """Suspend at the user's request."""
        async with self.exclusive():
            self.demand.held_off = True
            await self._suspend(unless_busy=False)

    async def _suspend(self, *, unless_busy: bool) -> bool:
        worker = self.device_state.worker
        if unless_busy and (self.preferences.pinned or (self.lease.held and self.demand.left)):
            return False
        if worker is None:
            return True
        try:
            await self.machine.chance.act(0.1)
        except Exception:
            return False
        if worker.broken or (unless_busy and self.lease.held and self.demand.left):
            self.look()
            return False
        worker.stop()
        self._off()
        return True

    def _off(self) -> None:
        """Do what `Suspender.suspended` does."""
        self.device_state.worker, self.demand.needed = None, False
        self.set_state(State.SUSPENDED, "")
        self.device_state.announce(Presence.ABSENT)
        self.lease.suspended()
        self.arbiter.evicted(self.id, self.allocator.device.id)
        self.allocator.release(self.tenant)
        self.look()

    # Reconcile task.

    async def _attend(self) -> None:
        while True:
            await self.looks.wait()
            self.looks.clear()
            async with self.exclusive():
                await self._serve()

    async def _serve(self) -> None:
        state = self.device_state
        if state.worker is not None and state.worker.broken:
            state.worker, self.demand.needed = None, True
            self.lease.lost("")
        if self.demand.wants_worker():
            await self._restore()
        if state.worker is not None:
            await self.lease.start()
        await self.lease.rest()

    async def _restore(self) -> None:
        """Do what `Restorer.restore` does."""
        state = self.device_state
        self.demand.needed = self.demand.needed or state.worker is None
        self.lease.ask()
        if not self.lease.held:
            if state.worker is None and not self.preferences.pinned:
                self.allocator.release(self.tenant)
            return None
        if state.worker is not None:
            return None
        answer = await self.allocator.reserve(self.tenant, self.memory, queued=True)
        if answer is not GrantAnswer.GRANTED:
            self.allocator.ledger.release(self.id)
            return self.lease.cannot("There is no room.")
        try:
            await self.machine.chance.act(0.3)
        except Exception as error:
            self.allocator.release(self.tenant)
            return self.lease.cannot(str(error))
        state.worker, self.demand.needed, state.position = CellWorker(self), False, 1
        return None

    def __repr__(self) -> str:
        lease, state = self.lease, self.device_state
        session = self.machine.controller._engine._sessions.get(self.id)
        engine = session and {
            key: getattr(session, key)
            for key in ("phase", "token", "devices", "homes", "moving", "bound", "pinned_on")
        }
        return (
            f"{self.id} on {self.allocator.device.id}: left {self.demand.left:.3f}, {self.state}, "
            f"needed {self.demand.needed}, held off {self.demand.held_off}, "
            f"pinned {self.preferences.pinned}, "
            f"worker {state.worker and vars(state.worker)}, lock {self.lock.locked()}, "
            f"lease {lease._token, lease._reserved, lease._asked, lease._taking, lease._closed}; "
            f"{engine}"
        )
