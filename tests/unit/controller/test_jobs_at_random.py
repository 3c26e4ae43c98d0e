"""Jobs among other sessions, while everything happens to them, in any order.

Two sessions have leases on one device at once only if they are ranks of one job, and never for long
while other ranks of it cannot execute. When nothing more happens, all that want a device get it,
and when all have ended nothing is left.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from jupyter_sing.controller import controller as live
from jupyter_sing.controller.jobs.job import JobState
from jupyter_sing.scheduler.gangs.ranks import sizes
from tests.doubles.scheduler import virtual
from tests.doubles.scheduler.ranks import MB, AgentDouble

JOBS = {"small": 2, "odd": 3, "large": 4}
POLICY = """
virtual_clusters:
  default: {users: [{name: alice, tier: premium}, {name: bob, tier: basic}, carol]}
"""
#: Seconds for which a part of a job may have leases and the rest wait: loading, and retries.
APART_MAX = 20.0


class Trial:
    """Sessions and jobs on two or three devices."""

    def __init__(self, agent: AgentDouble, seed: int) -> None:
        self.agent, self.random = agent, Random(seed)
        self.ranks: dict[str, tuple[str, int]] = {}  # job and number of a session
        self.count = 0
        self.apart: dict[str, float] = {}
        self.grown = 0
        agent.fails = lambda action, session: self.random.random() < 0.05

    def open(self) -> None:
        self.count += 1
        name = f"{self.count:012x}"
        user = self.random.choice(["alice", "bob", "carol"])
        device = self.random.choice(list(self.agent.devices))
        memory = self.random.choice([0, 10, 100, 200]) * MB
        self.agent.open(name, user, device, memory=memory, bound=self.random.random() < 0.05)

    def launch(self) -> None:
        """Start a job of which all ranks ask for a device soon."""
        job = self.random.choice(list(JOBS))
        memory = self.random.choice([10, 100]) * MB
        if any(job == self.ranks[each][0] for each in self.agent.sessions if each in self.ranks):
            return
        for number in range(JOBS[job]):
            self.count += 1
            name = f"{self.count:012x}"
            self.ranks[name] = job, number
            self.agent.open(name, "carol", memory=memory)
            if self.random.random() < 0.5:
                self.agent.ask(name)

    def join(self, *, certainly: bool = False) -> None:
        for name, (job, number) in self.ranks.items():
            if name in self.agent.sessions and (certainly or self.random.random() < 0.8):
                self.agent.controller.joined(name, job, number, JOBS[job])

    def step(self) -> None:
        agent, random = self.agent, self.random
        names = list(agent.sessions)
        kinds = ["open", "launch", "join", "ask", "ask", "ask", "rest", "rest", "close", "lose"]
        kinds += ["move", "pin", "fail", "heal", "measure", "restart"]
        weights = [1, 4, 6, 8, 8, 8, 10, 10, 2, 1, 1, 0.5, 0.3, 1, 3, 0.2]
        kind = random.choices(kinds, weights)[0]
        if kind in ("open", "launch", "join", "restart"):
            if kind == "join" or kind == "restart" or len(names) < 9:
                getattr(self, kind)()
            return
        if kind in ("fail", "heal"):
            device = random.choice(list(agent.devices))
            if kind == "heal" and not agent.executing(device):  # they have stopped
                agent.heal(device)
            elif kind == "fail" and len(agent.failed) + 1 < len(agent.devices):
                agent.fail(device)
            return
        if not names:
            return
        name = random.choice(names)
        if kind == "move":
            agent.move(name, random.choice(list(agent.devices)))
        elif kind == "pin":
            pinned = agent.sessions[name].terms.pinned
            if not agent.sessions[name].executes:
                agent.pin(name, not pinned)
        elif kind == "measure":
            agent.controller.measured(name, random.choice([10, 50, 150]) * MB, 0.1)
        else:
            getattr(agent, kind)(name)

    def restart(self) -> None:
        agent = self.agent
        agent.restart()
        agent.controller.apply(POLICY, dry=False)
        for device in agent.failed:
            agent.controller.device_changed(device, failed=True)
        for each in agent.sessions.values():
            agent.controller.opened(replace(each.terms, device=each.device))
        self.join()
        for name, each in agent.sessions.items():
            if each.wants:
                agent.controller.wants(name)

    def check(self, seconds: float) -> None:
        agent = self.agent
        for device in agent.devices:
            there = agent.executing(device)
            jobs = {self.ranks.get(each, (each, 0))[0] for each in there}
            assert len(jobs) <= 1, f"unrelated sessions on {device}"
            together = [agent.controller._jobs.of(each) for each in there]
            assert len(there) <= 1 or all(together), "ranks that are no gang execute at once"
        held = agent.controller.held()
        for name, each in agent.sessions.items():
            if each.executes and each.device not in agent.failed:
                assert held[name] == (each.device, each.token)
        for job in list(agent.controller._jobs._jobs.values()):
            if job.state is not JobState.TOGETHER:
                continue
            wanting = [agent.sessions[each] for each in job.ranks if agent.sessions[each].wants]
            running = sum(each.executes for each in wanting)
            part = 0 < running < len(wanting)
            self.apart[job.id] = self.apart.get(job.id, 0.0) + seconds if part else 0.0
            assert self.apart[job.id] < APART_MAX, "some ranks execute, and others do not"

    def describe(self, name: str) -> str:
        controller = self.agent.controller
        job, engine = controller._jobs.of(name), controller._engine
        known = engine._sessions.get(name if job is None else job.id)
        return f"{self.agent.sessions[name]} of {job}: {known and known.phase}"

    async def calm(self) -> None:
        """All sessions that want a device get one when nothing more happens."""
        agent, fails = self.agent, self.agent.fails
        agent.fails = lambda action, session: False
        for device in list(agent.failed):
            agent.heal(device)
        for name, each in agent.sessions.items():
            if each.terms.pinned:
                agent.pin(name, pinned=False)
        left = [name for name, each in agent.sessions.items() if each.wants]
        for _ in range(4000):
            await asyncio.sleep(0.5)
            self.check(0.5)
            for name in list(left):
                if agent.sessions[name].executes:
                    left.remove(name)
            if not left:
                break
        assert not left, f"waits for ever: {[self.describe(name) for name in left]}"
        await self.grow()
        agent.fails = fails

    async def grow(self) -> None:
        """A job that is alone with the devices is soon on as many as suit it."""
        agent = self.agent
        self.launch()
        self.join(certainly=True)
        jobs = [j for j in agent.controller._jobs._jobs.values() if j.state is JobState.TOGETHER]
        if not jobs:
            return  # they have lost a rank
        job = self.random.choice(jobs)
        for name in agent.sessions:
            (agent.ask if name in job.ranks else agent.rest)(name)
        for _ in range(400):
            await asyncio.sleep(0.5)
            self.check(0.5)
        assert job.lease is not None
        assert len(job.lease.devices) == sizes(job.size, 1, len(agent.devices))[-1]
        self.grown += 1


@pytest.mark.parametrize("seed", range(6))
def test_jobs_are_served_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        settings = replace(live.LIVE, grow_after=(0.0, 1.0, 5.0)[seed % 3])
        agent = AgentDouble(monkeypatch, 2 + seed % 2, settings)
        agent.controller.apply(POLICY, dry=False)
        trial = Trial(agent, seed)
        for _ in range(8):
            for _ in range(150):
                trial.step()
                seconds = trial.random.choice([0.0, 0.005, 0.05, 1.0])
                await asyncio.sleep(seconds)
                trial.check(seconds)
            await trial.calm()
        assert trial.grown
        for name in list(agent.sessions):
            agent.close(name)
        await asyncio.sleep(1.0)
        assert agent.controller._engine._sessions == {}
        assert agent.controller._jobs._jobs == {}
        assert agent.controller.held() == {}
        for device in agent.controller._engine._leases.table.devices.values():
            assert device.is_free
            assert device.used == 0
        agent.controller._driver.close()

    virtual.run(main())
