"""Machine double in virtual time on which every action may fail.

It knows the actual state, with which tests compare what the controller believes. The controller,
its engine, and the agent's scheduler actions, leases, commands, migration and device allocator are
the real ones. Sessions and their workers are doubles: they take time, fail, are late, and users act
on them meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from jupyter_sing.controller import accounts_writer
from jupyter_sing.controller import controller as live
from kernelproxy.agent.api.scheduler_actions import SchedulerActions
from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lease import lease as leases
from kernelproxy.agent.residency import migrate as migrating
from kernelproxy.common.errors import ControlError, InternalError, WorkerError
from kernelproxy.devices import Device
from tests.doubles.scheduler.notebook import MachineNotebook

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
            each.demand.needed = bool(each.used)
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
