"""Every decision of the controller is answered: failed actions, with the reason, and others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.api.scheduler_actions import SchedulerActions
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.common.errors import ControlError, InternalError

HERE, THERE = "cpu:0", "cpu:1"


class ArbiterRecorder:
    """Controller double that records its calls."""

    keeps = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, *args))


class Fake:
    """Session double on `HERE` that can only migrate and be evicted."""

    def __init__(self, arbiter: ArbiterRecorder, error: Exception | None) -> None:
        self.id, self.error, self.closing = "s", error, False
        self.prepared = ""
        device = SimpleNamespace(id=HERE, memory_total=1)
        self.allocator = SimpleNamespace(device=device, tenants={})
        self.core = self.tenant = self
        self.preferences = SimpleNamespace(pinned=False)
        client = SimpleNamespace(memory_used=0)
        self.device_state = SimpleNamespace(
            worker=None,
            position=0,
            lease=(0, False),
            busy_seconds=0.0,
            memory=SimpleNamespace(client=client),
            memory_request=None,
        )
        self.looks = 0
        self.lock = asyncio.Lock()
        self.commands = SimpleNamespace(migrate=self.migrate, prepare=self.prepare)
        demand, idle = SimpleNamespace(), SimpleNamespace()
        self.lease = DeviceLease(self, self.device_state, demand, idle, arbiter)  # type: ignore[arg-type]

    async def migrate(self, allocator: Any, check: Callable[[], None]) -> None:
        async with self.lock:
            check()
            if self.error is not None:
                raise self.error
            self.allocator = allocator

    async def prepare(self, allocator: Any) -> None:
        if self.error is not None:
            raise self.error
        self.prepared = allocator.device.id

    async def evict(self, device: str, reason: str) -> bool:
        if self.error is not None:
            raise self.error
        return self.allocator.device.id == device and not self.preferences.pinned

    def request_reconcile(self) -> None:
        self.looks += 1


Do = Callable[[SchedulerActions, Fake, ArbiterRecorder], Any]


def run(do: Do, error: Exception | None = None) -> list[tuple[Any, ...]]:
    async def main() -> list[tuple[Any, ...]]:
        recorder = ArbiterRecorder()
        session = Fake(recorder, error)
        there = SimpleNamespace(device=SimpleNamespace(id=THERE, memory_total=1))
        arbiter: Any = recorder
        sessions: dict[str, Any] = {"s": session}
        allocators: dict[str, Any] = {HERE: session.allocator, THERE: there}
        actions = SchedulerActions(arbiter, sessions, allocators)
        result = do(actions, session, recorder)
        if result is not None:
            await result
        for _ in range(10):
            await asyncio.sleep(0)
        await actions.close()
        return recorder.calls

    return asyncio.run(main())


ERRORS = [
    pytest.param(ControlError("There is no room.", "no-room"), id="sing"),
    pytest.param(InternalError("An invariant is broken."), id="internal"),
    pytest.param(ValueError("A mistake."), id="other"),
    pytest.param(KeyError("A mistake."), id="key"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_a_grant_elsewhere_that_fails_is_refused(error: Exception) -> None:
    ((name, session, token, why),) = run(lambda h, s, t: h.grant("s", THERE, 7), error)
    assert (name, session, token) == ("refused", "s", 7)
    assert str(error) in why


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("act", ["evict", "migrate"])
def test_a_failed_eviction_is_reported_as_stayed(act: str, error: Exception) -> None:
    third = "makes room" if act == "evict" else THERE
    ((name, session, device, why),) = run(lambda h, s, t: getattr(h, act)("s", HERE, third), error)
    assert (name, session, device) == ("stayed", "s", HERE)
    assert str(error) in why


@pytest.mark.parametrize("error", [None, *ERRORS])
def test_a_preparation_has_no_answer(error: Exception | None) -> None:
    async def do(actions: SchedulerActions, session: Fake, recorder: ArbiterRecorder) -> None:
        actions.prepare("s", THERE)
        actions.prepare("unknown", THERE)
        await asyncio.sleep(0)
        assert session.prepared == ("" if error else THERE)

    assert run(do, error) == []


@pytest.mark.parametrize(
    ("act", "args"),
    [("grant", (THERE, 7)), ("evict", (HERE, "makes room")), ("migrate", (HERE, THERE))],
)
def test_a_pin_in_between_is_heeded_and_answered(act: str, args: tuple[Any, ...]) -> None:
    def do(actions: SchedulerActions, session: Fake, recorder: ArbiterRecorder) -> None:
        getattr(actions, act)("s", *args)
        session.preferences.pinned = True

    ((name, *rest),) = run(do)
    assert name == ("refused" if act == "grant" else "stayed")
    assert rest[-1] == "It is pinned."


@pytest.mark.parametrize("act", ["evict", "migrate"])
def test_a_session_that_migrated_meanwhile_is_left_alone(act: str) -> None:
    def do(actions: SchedulerActions, session: Fake, recorder: ArbiterRecorder) -> None:
        getattr(actions, act)("s", HERE, THERE)
        session.allocator = SimpleNamespace(device=SimpleNamespace(id="cpu:2"))

    ((name, _, device, _),) = run(do)
    assert (name, device) == ("stayed", HERE)


def test_a_preemption_that_overtakes_a_grant_is_answered_and_it_executes_nothing() -> None:
    def do(actions: SchedulerActions, session: Fake, recorder: ArbiterRecorder) -> None:
        actions.grant("s", THERE, 7)
        actions.preempt("s", 7)
        assert not session.lease.held

    ((name, _, token, _),) = run(do)
    assert (name, token) == ("refused", 7)


def test_a_grant_that_was_overtaken_does_not_come_after_the_next_one() -> None:
    async def do(actions: SchedulerActions, session: Fake, recorder: ArbiterRecorder) -> None:
        async with session.lock:
            actions.grant("s", THERE, 7)
            await asyncio.sleep(0)
            session.lease.lost("")
            actions.grant("s", HERE, 8)
        for _ in range(5):
            await asyncio.sleep(0)
        assert session.lease._token == 8

    assert [call[:3] for call in run(do)] == [("lost", "s", ""), ("refused", "s", 7)]


@pytest.mark.parametrize("taken", [False, True])
def test_a_session_suspended_in_its_turn_requests_a_new_one(taken: bool) -> None:
    """Also while it is being preempted: otherwise it would count as being on its device forever."""

    async def do(actions: SchedulerActions, session: Any, recorder: ArbiterRecorder) -> None:
        async def never(*_: object) -> None:
            await asyncio.sleep(1000.0)

        session.device_state.worker = SimpleNamespace(take_lease=never)
        session.lease.ask()
        actions.grant("s", HERE, 7)
        if taken:
            actions.preempt("s", 7)
            await asyncio.sleep(0)
        session.lease.suspended()
        assert not session.lease.held
        assert not session.lease.waiting
        session.lease.ask()

    calls = [call[0] for call in run(do)]
    assert [call for call in calls if call != "measured"] == ["wants", "done", "wants"]


def test_a_session_suspended_while_waiting_keeps_its_place() -> None:
    def do(actions: SchedulerActions, session: Fake, recorder: ArbiterRecorder) -> None:
        session.lease.ask()
        session.lease.suspended()
        assert session.lease.waiting

    assert run(do) == [("wants", "s")]


def test_a_turn_that_cannot_be_ended_ends_the_session() -> None:
    """It is unknown whether it still executes, and another session must not execute meanwhile."""

    async def do(actions: SchedulerActions, session: Any, recorder: ArbiterRecorder) -> None:
        async def broken(*_: object) -> None:
            raise ValueError("A mistake.")

        session.device_state.worker = SimpleNamespace(take_lease=broken)
        session.fail = lambda why: recorder.failed(why)
        actions.grant("s", HERE, 7)
        actions.preempt("s", 7)

    ((name, why),) = run(do)
    assert name == "failed"
    assert "A mistake." in why
