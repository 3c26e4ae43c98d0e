"""All actions fail at random, among them those for the ranks of jobs, without lasting effects.

The controller, and the agent's actions, leases, migration and device allocator are the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

import pytest

from jupyter_sing.controller.jobs.job import JobState
from jupyter_sing.scheduler.queue import evictions
from jupyter_sing.scheduler.state import Phase
from kernelproxy.devices import Device, configured_devices
from tests.doubles.scheduler import machine, virtual
from tests.doubles.scheduler.machine import MIB
from tests.doubles.scheduler.notebook import MachineNotebook
from tests.scheduler.engine.test_failing_actions import HOUR, Trial

JOBS = 2


class JobTrial(Trial):
    """Some users of a machine, and jobs that are launched one after the other."""

    def __init__(self, seed: int, directory: Path, devices: dict[str, Device]) -> None:
        super().__init__(seed, directory, devices)
        self.names = itertools.count()
        self.launched = 0
        self.sizes: set[int] = set()
        self.machine.chance.trouble = 0.1

    async def live(self, index: int) -> None:
        """Run one notebook after another, or one job."""
        if index >= JOBS:
            await super().live(index)
        while True:
            await self.launch()

    async def launch(self) -> None:
        """Run a job whose ranks compute by turns, each for a while."""
        while self.calm:
            await asyncio.sleep(1.0)
        size, job = self.random.choice((2, 3, 4)), f"job {next(self.names)}"
        memory = self.random.choice((50, 100)) * MIB
        first = next(iter(self.machine.devices))
        ranks = [self.machine.open("ann", memory, first, bound=False) for _ in range(size)]
        for number, each in enumerate(ranks):
            each.join(job, number, size)
        for _ in range(self.random.randrange(2, 8)):
            while self.calm:
                await asyncio.sleep(1.0)
            for each in ranks:
                each.run(self.random.choice((0.5, 5.0, 30.0)))
            while any(each.demand.left for each in ranks):
                await asyncio.sleep(self.random.expovariate(1 / 10.0))
                if not self.calm:
                    await self.disturb(self.random.choice(ranks))
        for each in ranks:
            if each.preferences.pinned:
                each.pin(False)
            await each.close()
        self.launched += 1

    def check(self) -> None:
        """Check what holds at any time; ranks of a gang may execute at once."""
        controller = self.machine.controller
        held = controller.held()
        for each in self.machine.notebooks.values():
            if (token := each.lease._token) is not None:
                assert held.get(each.id) == (each.allocator.device.id, token), "nobody gave it that"
            if each.attending.done() and not each.closing:
                each.attending.result()
        for allocator in self.machine.allocators.values():
            executing = [e for e in self.machine.notebooks.values() if self.executes(e, allocator)]
            gangs = {controller._jobs.of(each.id) and each.rank for each in executing}
            names = {rank and rank[0] for rank in gangs}
            assert len(executing) <= 1 or (len(names) == 1 and None not in names)
            assert allocator.ledger.free >= 0
        for job in controller._jobs._jobs.values():
            if job.lease is not None:
                self.sizes.add(len(job.lease.devices))

    @staticmethod
    def executes(notebook: MachineNotebook, allocator: object) -> bool:
        worker = notebook.device_state.worker
        return worker is not None and worker.since is not None and notebook.allocator is allocator

    def check_rest(self) -> None:
        """Check what holds when all work has ended."""
        for each in self.machine.notebooks.values():
            assert not each.demand.left, f"waits for ever: {each}"
        controller = self.machine.controller
        engine = controller._engine
        for name, session in engine._sessions.items():
            assert session.phase is Phase.IDLE, f"{name}: {session.phase}"
            assert not session.residency.moving
        assert not list(engine._leases.reservations)
        for job in controller._jobs._jobs.values():
            assert job.lease is None
            assert not job.awaited
            assert not job.evicting
            assert job.state in (JobState.APART, JobState.TOGETHER)
        for name, device in engine._leases.table.devices.items():
            assert (device.incoming, device.lessees) == (None, []), f"{name} stays reserved"
            actual = set()
            for each in self.machine.notebooks.values():
                if each.device_state.worker is not None and each.allocator.device.id == name:
                    gang = controller._jobs.of(each.id)
                    actual.add(each.id if gang is None else gang.id)
            assert {each.id for each in device.residents} == actual, "books and truth differ"
            assert device.used == sum(device.residents.values())
        assert not controller.held()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed", "most"), [(1, 1, 1), (2, 2, 2), (3, 4, 1)])
def test_whatever_fails_jobs_are_served(
    count: int, seed: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate hours on one to three devices, in which each tenth action fails."""
    monkeypatch.setenv("JUPYTER_SING_DEVICES", ",".join(["cpu:1GiB@1"] * count))
    devices = {each.id: each for each in configured_devices()}
    machine.patch(monkeypatch)
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr(evictions, "MIGRATION_PAUSE", 1.0)
    logging.disable(logging.CRITICAL)  # each failure is logged

    async def main() -> JobTrial:
        trial = JobTrial(seed, tmp_path, devices)
        await trial.run(hours=3600.0 / HOUR)
        return trial

    try:
        trial = virtual.run(main())
    finally:
        logging.disable(logging.NOTSET)
    print(f"seed {seed}: {trial.launched} jobs on {trial.sizes}, {dict(trial.machine.answers)}")
    assert trial.launched > 5
    assert max(trial.sizes) >= most
