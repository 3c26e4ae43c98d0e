"""All actions of the controller fail at random, for hours, without lasting effects.

No session that an idle device could serve waits forever, no device stays reserved, and the
controller's state agrees with the actual state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from pathlib import Path

import pytest

from jupyter_sing.scheduler.queue import evictions
from jupyter_sing.scheduler.state import Phase
from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.common.errors import SingError
from kernelproxy.devices import Device, configured_devices
from tests.doubles.scheduler import machine, virtual
from tests.doubles.scheduler.machine import MIB, Machine
from tests.doubles.scheduler.notebook import MachineNotebook

HOUR = 3600.0
#: Seconds for which a session may wait beside a device without a holder: attempts that fail late.
IDLE_MAX = 180.0

POLICIES = (
    "",
    "{}",
    "defaults: {quotas: {devices: 1}}",
    "defaults: {packing: true}",
    "tiers: {standard: {max_hold: 5 s}}",
    "cluster: {devices_per_host: 2}\n"
    "virtual_clusters: {lab: {users: [ann], guaranteed_devices: 1}}",
    "virtual_clusters: {lab: {users: [{name: ann, tier: premium}, {name: bob, tier: basic}]}}",
)


class Trial:
    """Some users of a machine, and checks of its state."""

    def __init__(self, seed: int, directory: Path, devices: dict[str, Device]) -> None:
        self.machine = Machine(seed, directory, devices)
        self.random, self.calm = self.machine.chance.random, False
        self.idle_for: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.policy = ""

    async def run(self, hours: float) -> None:
        loop = asyncio.get_running_loop()
        tasks = [
            asyncio.create_task(self.live(index))
            for index in range(3 + 2 * len(self.machine.devices))
        ]
        tasks.append(asyncio.create_task(self.administer()))
        while loop.time() < hours * HOUR:
            for _ in range(1500):
                await asyncio.sleep(1.0)
                self.check()
                for task in tasks:
                    if task.done():
                        task.result()
            await self.rest()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in list(self.machine.notebooks.values()):
            await each.close()
        await self.machine.actions.close()
        self.check_empty()

    # Actions of users.

    async def live(self, index: int) -> None:
        """Run one notebook after another."""
        user, sizes = ("ann", "bob", "eve")[index % 3], (100, 200, 400, 600)
        while True:
            found = self.machine.open(
                user,
                self.random.choice(sizes) * MIB,
                self.random.choice(list(self.machine.devices)),
                bound=self.random.random() < 0.2,
            )
            for _ in range(self.random.randrange(3, 40)):
                await self.cell(found)
            if found.preferences.pinned:
                found.pin(False)
            await found.close()

    async def cell(self, notebook: MachineNotebook) -> None:
        await asyncio.sleep(self.random.expovariate(1 / 5.0))
        while self.calm:
            await asyncio.sleep(1.0)
        notebook.run(self.random.choice((0.05, 0.5, 2.0, 10.0, 60.0)))
        while notebook.demand.left:
            await asyncio.sleep(self.random.expovariate(1 / 10.0))
            if not self.calm:
                await self.disturb(notebook)

    async def disturb(self, notebook: MachineNotebook) -> None:
        """Simulate a user action or an event while a cell runs or waits."""
        worker, fate = notebook.device_state.worker, self.random.random()
        kinds = ("pin", "suspend", "migrate", "kill", "interrupt")
        kind = kinds[int(fate / 0.05)] if fate < 0.05 * len(kinds) else ""
        self.counted[kind] += 1
        if kind == "pin":
            others = [e for e in self.machine.notebooks.values() if e.preferences.pinned]
            if notebook.preferences.pinned or not others:
                notebook.pin(not notebook.preferences.pinned)
        elif kind == "suspend":
            await notebook.suspend()
            notebook.run(0.0)
        elif kind == "migrate":
            with contextlib.suppress(SingError):
                await notebook.commands.migrate(
                    self.random.choice(list(self.machine.allocators.values()))
                )
        elif kind == "kill" and worker is not None:
            worker.die()
        elif kind == "interrupt":
            if worker is not None:
                worker.stop()
            notebook.demand.left = 0.0
            notebook.look()

    async def administer(self) -> None:
        """Change policies and restart agents at random."""
        while True:
            await asyncio.sleep(self.random.expovariate(1 / 150.0))
            if self.calm:
                continue
            if self.random.random() < 0.2:
                self.counted["restart"] += 1
                await self.machine.restart()
            else:
                self.apply(self.random.choice(POLICIES))

    def apply(self, policy: str) -> None:
        self.policy = policy
        self.machine.controller.apply(policy, dry=False)

    async def rest(self) -> None:
        """Stop new work and failures, and wait until everything has ended."""
        self.calm, trouble = True, self.machine.chance.trouble
        self.machine.chance.trouble = 0.0
        self.apply("")
        for each in self.machine.notebooks.values():
            if each.preferences.pinned:
                each.pin(False)
        for _ in range(900):
            await asyncio.sleep(1.0)
        self.check_rest()
        self.calm, self.machine.chance.trouble = False, trouble

    # Invariants.

    def check(self) -> None:
        """Check what holds at any time."""
        held = self.machine.controller.held()
        for each in self.machine.notebooks.values():
            if (token := each.lease._token) is not None:
                assert held.get(each.id) == (each.allocator.device.id, token), "nobody gave it that"
        for allocator in self.machine.allocators.values():
            executing = [
                each
                for each in self.machine.notebooks.values()
                if (worker := each.device_state.worker) is not None
                and worker.since is not None
                and each.allocator is allocator
            ]
            assert len(executing) <= 1, "two execute at once"
            assert allocator.ledger.free >= 0
        for each in self.machine.notebooks.values():
            if each.attending.done() and not each.closing:
                each.attending.result()
            waits = each.demand.wants_worker() and not each.lease.held
            served = waits and any(
                self.could(each, allocator) for allocator in self.machine.allocators.values()
            )
            self.idle_for[each.id] = self.idle_for[each.id] + 1 if served else 0
            assert self.idle_for[each.id] < IDLE_MAX, f"waits beside an idle device: {each}"

    def could(self, notebook: MachineNotebook, allocator: DeviceAllocator) -> bool:
        """True if a device without a holder could serve this notebook."""
        if notebook.bound or notebook.preferences.pinned:
            return allocator is notebook.allocator and not self.machine.holders(allocator.device.id)
        others = [e for e in self.machine.notebooks.values() if e is not notebook]
        if "devices: 1" in self.policy and any(e.user == notebook.user for e in others):
            return False
        kept = sum(each.kept for each in others if each.allocator is allocator)
        if kept + 1.06 * notebook.memory > allocator.ledger.total:
            return False
        return not self.machine.holders(allocator.device.id)

    def check_rest(self) -> None:
        """Check what holds when all work has ended."""
        for each in self.machine.notebooks.values():
            assert not each.demand.left, f"waits for ever: {each}"
        engine = self.machine.controller._engine
        for name, session in engine._sessions.items():
            assert session.phase is Phase.IDLE, f"{name}: {session.phase}"
            assert not session.residency.moving
        assert not list(engine._leases.reservations)
        for name, device in engine._leases.table.devices.items():
            assert (device.incoming, device.lessees) == (None, []), f"{name} stays reserved"
            assert {each.id for each in device.residents} == {
                each.id
                for each in self.machine.notebooks.values()
                if each.device_state.worker is not None and each.allocator.device.id == name
            }, "books and truth differ"
            assert device.used == sum(device.residents.values())
        assert not self.machine.controller.held()

    def check_empty(self) -> None:
        """Check what holds when all sessions were closed."""
        leases = self.machine.controller._engine._leases
        assert not leases.sessions
        assert not list(leases.reservations)
        assert not leases.table.refusals._known
        for device in leases.table.devices.values():
            assert device.is_free
            assert (device.used, device.residents) == (0, {})
            assert leases.table.host.used(device.node) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(1, 10), (2, 20), (2, 21), (3, 30)])
def test_whatever_fails_everybody_is_served(
    count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate four hours on one to three devices, in which each fourth action fails."""
    monkeypatch.setenv("JUPYTER_SING_DEVICES", ",".join(["cpu:1GiB@1"] * count))
    devices = {each.id: each for each in configured_devices()}
    machine.patch(monkeypatch)
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr(evictions, "MIGRATION_PAUSE", 1.0)
    logging.disable(logging.CRITICAL)  # each failure is logged

    async def main() -> Trial:
        trial = Trial(seed, tmp_path, devices)
        await trial.run(hours=1.0)
        return trial

    try:
        trial = virtual.run(main())
    finally:
        logging.disable(logging.NOTSET)
    print(f"seed {seed}: {dict(trial.counted)}, {dict(trial.machine.answers)}")
    assert min(trial.machine.answers[kind] for kind in ("refused", "stayed")) > 10
