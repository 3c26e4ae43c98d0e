"""Machine double in virtual time on which every action may fail.

It knows the actual state, with which tests compare what the controller believes. The controller,
its engine, and the agent's scheduler actions, leases, commands, migration and device allocator are
the real ones. Sessions and their workers are doubles: they take time, fail, are late, and users act
on them meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from jupyter_sing.controller import accounts_writer
from jupyter_sing.controller import controller as live
from kernelproxy.agent.api.scheduler_actions import SchedulerActions
from kernelproxy.agent.devices.device_allocator import DeviceAllocator, GrantAnswer
from kernelproxy.agent.devices.memory_grants import Neighbour
from kernelproxy.agent.lease import lease as leases
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.lifecycle.commands import Commands
from kernelproxy.agent.residency import migrate as migrating
from kernelproxy.agent.residency.migrate import Migrator
from kernelproxy.agent.session.states import State
from kernelproxy.common.errors import ControlError, InternalError, WorkerError
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.scheduler_api import Allowance, SessionDescription
from kernelproxy.common.shared_memory import Presence
from kernelproxy.devices import Device

MIB = 1 << 20


class Chance:
    """Source of random failures and delays.

    Attributes
    ----------
    trouble
        Fraction of actions that fail or are late.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.trouble = Random(seed), 0.25

    async def act(self, seconds: float) -> None:
        """Take `seconds`; or fail at once, fail late, or be late."""
        fate = self.random.random() / self.trouble if self.trouble else 1.0
        if fate < 0.3:
            raise self.error("at once")
        await asyncio.sleep(seconds if fate >= 0.6 else 20.0 * self.random.random())
        if fate < 0.6:
            raise self.error("late")

    def error(self, when: str) -> Exception:
        """Return one of our own errors, or an unexpected one."""
        kinds = (WorkerError, InternalError, ControlError, ValueError)
        return self.random.choice(kinds)(f"It fails {when}.")


class MemoryFiles:
    """In-memory replacement for the files of the controllers of a machine."""

    def __init__(self) -> None:
        self.accounts: Any = None

    def note(self, entry: Any) -> None:
        assert entry.reason

    def keep(self, accounts: Any) -> None:
        self.accounts = accounts

    def close(self) -> None:
        pass


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
            self.timer = loop.call_later(self.notebook.left, self.over)

    def stop(self) -> None:
        if self.since is not None and self.timer is not None:
            self.timer.cancel()
            done = asyncio.get_running_loop().time() - self.since
            self.notebook.left = max(0.0, self.notebook.left - done)
        self.since = None

    def over(self) -> None:
        self.stop()
        self.notebook.left = 0.0
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
        return not self.notebook.left

    def announce(self, presence: Presence, reason: str = "") -> None:
        self.memory.agent.presence = presence

    def expedite(self) -> None:
        pass

    def settle_on(self, device: Device) -> None:
        self.device = device


class MachineNotebook:
    """Session double, with what the real parts of an agent use."""

    shared = script = False
    python, kernel = "python", SimpleNamespace(torch_version="2", pid=1)
    awaited = False
    memory_limit, used = 1 << 60, 0

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
        self.memory, self.allocator, self.bound, self.owner = memory, allocator, bound, 1
        self.left, self.used = 0.0, False
        self.observed = SimpleNamespace(suspend_failure="")
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
        self.closing, self.held_off, self.needed, self.claims = False, False, False, 0
        self.state = State.IDLE
        self.waits_since: float | None = None
        self.device_state = NotebookState(self)
        self.lock, self.looks = asyncio.Lock(), asyncio.Event()
        me: Any = self
        idle: Any = SimpleNamespace(drained_for=lambda: 0.0)
        self.lease = DeviceLease(me, me.device_state, me, idle, self.arbiter)
        self.lease.monitor = MemoryMonitor(self)  # type: ignore[assignment]
        migrator = Migrator(me, me.device_state, self.lease, me, me)
        self.commands = Commands(me, me.device_state, me, me, me, migrator, me, self.describe)
        self.allocator.tenants[self.id] = self.tenant
        self.attending = asyncio.create_task(self._attend())
        self.arbiter.opened(self.terms())

    def terms(self) -> SessionDescription:
        return SessionDescription(
            self.id, self.name, 1, self.allocator.device.id, self.memory, self.bound, self.user,
            self.preferences.pinned,
        )  # fmt: skip

    # Actions of users.

    def run(self, seconds: float) -> None:
        """Run a cell."""
        self.left, self.used = self.left + seconds, True
        worker = self.device_state.worker
        if worker is not None and worker.since is not None:
            worker.stop()
            worker.go()
        self.held_off = False
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
        self.left = 0.0
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

    def wants_worker(self) -> bool:
        return (self.needed or self.left > 0.0) and not self.held_off

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

    async def zygote(self) -> None:
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
            self.held_off = True
            await self._suspend(unless_busy=False)

    async def _suspend(self, *, unless_busy: bool) -> bool:
        worker = self.device_state.worker
        if unless_busy and (self.preferences.pinned or (self.lease.held and self.left)):
            return False
        if worker is None:
            return True
        try:
            await self.machine.chance.act(0.1)
        except Exception:
            return False
        if worker.broken or (unless_busy and self.lease.held and self.left):
            self.look()
            return False
        worker.stop()
        self._off()
        return True

    def _off(self) -> None:
        """Do what `Suspender.suspended` does."""
        self.device_state.worker, self.needed = None, False
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
            state.worker, self.needed = None, True
            self.lease.lost("")
        if self.wants_worker():
            await self._restore()
        if state.worker is not None:
            await self.lease.start()
        await self.lease.rest()
        if not self.lease.waiting:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = asyncio.get_running_loop().time()

    async def _restore(self) -> None:
        """Do what `Restorer.restore` does."""
        state = self.device_state
        self.needed = self.needed or state.worker is None
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
        state.worker, self.needed, state.position = CellWorker(self), False, 1
        return None

    def __repr__(self) -> str:
        lease, state = self.lease, self.device_state
        session = self.machine.controller._engine._sessions.get(self.id)
        engine = session and {
            key: getattr(session, key)
            for key in ("phase", "token", "devices", "homes", "moving", "bound", "pinned_on")
        }
        return (
            f"{self.id} on {self.allocator.device.id}: left {self.left:.3f}, {self.state}, "
            f"needed {self.needed}, held off {self.held_off}, pinned {self.preferences.pinned}, "
            f"worker {state.worker and vars(state.worker)}, lock {self.lock.locked()}, "
            f"lease {lease._token, lease._reserved, lease._asked, lease._taking, lease._closed}; "
            f"{engine}"
        )


class Counting(live.Controller):
    """Controller that counts failed actions."""

    answers: Counter[str]

    def refused(self, session: str, token: int, why: str) -> None:
        self.answers["refused"] += 1
        super().refused(session, token, why)

    def stayed(self, session: str, device: str, why: str) -> None:
        self.answers["stayed"] += 1
        super().stayed(session, device, why)


class Machine:
    """Devices, notebooks on them, and an agent that can be restarted."""

    def __init__(self, seed: int, directory: Path, devices: dict[str, Device]) -> None:
        self.chance, self.directory, self.devices = Chance(seed), directory, devices
        self.notebooks: dict[str, MachineNotebook] = {}
        self.numbers = itertools.count(1)
        #: Number of failed actions, by the call that reports them.
        self.answers: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Start an agent."""
        clock = asyncio.get_running_loop().time
        self.allocators = {
            name: DeviceAllocator(device, MIB) for name, device in self.devices.items()
        }
        for allocator in self.allocators.values():
            allocator.allocators = list(self.allocators.values())
        self.controller = Counting(clock=clock, directory=self.directory)
        self.controller.answers = self.answers
        self.actions = SchedulerActions(self.controller, self.notebooks, self.allocators)  # type: ignore[arg-type]
        self.controller.begin(self.actions, {n: d.memory_total for n, d in self.devices.items()})

    async def restart(self) -> None:
        """Kill the agent and all workers; the next agent continues with the same sessions."""
        await self.actions.close()
        controller, before = self.controller, list(self.notebooks.values())
        tasks = []
        for each in before:
            each.closing = True
            if each.device_state.worker is not None:
                each.device_state.worker.die()
            each.lease._closed = True  # it reports nothing more
            tasks += [each.attending, *each.commands.running]
            each.lease._end_taking()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        controller._books.close()
        controller._driver.close()
        self.notebooks.clear()
        self.begin()
        for each in before:
            each.allocator = self.allocators[each.allocator.device.id]
            self.notebooks[each.id] = each
            each.begin(pinned=each.preferences.pinned)
            each.needed = bool(each.used)
            each.look()

    def open(self, user: str, memory: int, device: str, *, bound: bool) -> MachineNotebook:
        """Start a kernel."""
        name = f"{next(self.numbers):012x}"
        found = MachineNotebook(self, name, user, memory, self.allocators[device], bound)
        self.notebooks[name] = found
        return found

    def holders(self, device: str) -> list[MachineNotebook]:
        """Return the notebooks that may execute on a device."""
        return [
            e for e in self.notebooks.values() if e.lease.held and e.allocator.device.id == device
        ]


def patch(monkeypatch: Any) -> None:
    """Replace by doubles what a machine does not need for real."""
    store = MemoryFiles()
    monkeypatch.setattr(live, "DecisionLog", lambda directory: store)
    monkeypatch.setattr(live, "read_accounts", lambda directory: store.accounts)

    def now() -> float:
        return asyncio.get_running_loop().time()

    for module in (leases, live, accounts_writer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now, time=now))

    async def migrate(state: Any, zygote: Any, target: Any, check: Any, on_change: Any) -> None:
        await on_change.__self__.move(target, check)

    monkeypatch.setattr(migrating, "migrate", migrate)
