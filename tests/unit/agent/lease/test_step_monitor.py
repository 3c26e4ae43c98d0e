"""Measurements of a session's progress, as reported to the controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lease import step_monitor
from kernelproxy.agent.lease.step_monitor import StepMonitor
from kernelproxy.common.protocol import Observed
from kernelproxy.common.scheduler_api import UnrestrictedArbiter

STEP = Observed(40, nadir=10, memory_min=5, memory_max=9, made=400, seconds=2.0)
WAIT_SECONDS = 120.0


class ReportedLease(UnrestrictedArbiter):
    """Controller double that records measurements."""

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float | None, float | None]] = []

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        assert (session, memory) == ("a", 7)
        self.steps.append((step_seconds, nadir))


class SteppedWorker:
    """Session double whose worker has observed this."""

    def __init__(self) -> None:
        self.id, self.observed, self.asked = "a", STEP, list[float]()
        self.allocator = DeviceAllocator(SimpleNamespace(memory_total=1 << 30), 1)  # type: ignore[arg-type]
        self.client = SimpleNamespace(head=100, memory_used=7)
        self.page = SimpleNamespace(consumed=100)
        memory = SimpleNamespace(client=self.client, worker=self.page)
        self.device_state = SimpleNamespace(
            memory=memory, worker=self, busy_seconds=1.0, memory_request=None
        )
        self.told = ReportedLease()
        self.watch = StepMonitor(self, self.device_state, self.told)  # type: ignore[arg-type]

    async def observe(self, since: float) -> Observed | None:
        self.asked.append(since)
        return self.observed

    async def after(self, condition: Callable[[], Any]) -> list[tuple[float | None, float | None]]:
        """Return the next measurements after a condition has become true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                await asyncio.sleep(0)
            count = len(self.told.steps)
            while len(self.told.steps) < count + 2:
                await asyncio.sleep(0)
        return self.told.steps[count + 1 :]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_monitor, "POLL_SECONDS", 0.0)


def watched(test: Callable[[SteppedWorker], Any]) -> None:
    async def run() -> None:
        fake = SteppedWorker()
        fake.watch.begin()
        await test(fake)
        fake.watch.end()
        assert "a" not in fake.allocator.lessees

    asyncio.run(run())


def test_steps_and_their_nadir_are_reported() -> None:
    async def test(fake: SteppedWorker) -> None:
        assert (await fake.after(lambda: fake.asked))[0] == (0.2, 0.25)
        assert fake.watch.step is not None
        assert fake.watch.step.memory_min == 5
        fake.observed = Observed(0)
        assert (await fake.after(lambda: fake.watch.step is None))[0] == (None, None)

    watched(test)


@pytest.mark.parametrize(
    "few", [Observed(40, made=79, seconds=2.0), Observed(40, made=4000, seconds=0.2)]
)
def test_few_steps_give_no_rate(few: Observed) -> None:
    async def test(fake: SteppedWorker) -> None:
        fake.observed = few
        assert (await fake.after(lambda: len(fake.asked) > 3))[0] == (None, None)

    watched(test)


def test_operators_issued_before_do_not_count() -> None:
    async def test(fake: SteppedWorker) -> None:
        fake.client.head = 500
        fake.watch.begin()
        assert (await fake.after(lambda: True))[0] == (None, None)
        assert not fake.asked
        fake.page.consumed, caught_up = 500, time.monotonic()
        assert (await fake.after(lambda: fake.asked))[0] == (0.2, 0.25)
        assert fake.asked[0] >= caught_up

    watched(test)


def test_beside_others_it_is_measured_anew() -> None:
    async def test(fake: SteppedWorker) -> None:
        await fake.after(lambda: fake.asked)
        fake.observed = Observed(40, made=0)  # none since the other session has a worker
        fake.allocator.enter("b")
        joined = fake.allocator.lessees_since
        assert (await fake.after(lambda: fake.asked[-1] == joined))[0] == (None, None)
        assert fake.watch.company() == ["b"]
        fake.observed = Observed(40, made=200, seconds=2.0)
        slower = await fake.after(lambda: fake.watch.step.seconds == 0.4)  # type: ignore[union-attr]
        assert slower[0][0] == 0.4

    watched(test)


def test_beside_others_only_what_was_measured_alone_is_compared() -> None:
    async def test(fake: SteppedWorker) -> None:
        await fake.after(lambda: fake.asked)
        fake.allocator.enter("b")
        fake.observed = Observed(3, made=3000, seconds=1.0)  # its behavior has changed
        found = await fake.after(lambda: fake.watch.step.records == 3)  # type: ignore[union-attr]
        assert found[0] == (None, None)
        fake.allocator.leave("b")
        assert (await fake.after(lambda: len(fake.watch.step.company) == 1))[0][0] == 0.001  # type: ignore[union-attr]

    watched(test)
