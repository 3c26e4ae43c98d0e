"""Upkeep: what keeps a session recoverable, with a state that only counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.state.snapshot_scheduler import (
    BEHIND_SECONDS,
    FULL,
    REST_SECONDS,
    RETRY_SECONDS,
    SnapshotScheduler,
)
from kernelproxy.common.errors import WorkerError

MIB = 1 << 20
CAPACITY, BUDGET = 512 * MIB, 256 * MIB
TOO_DEAR = 1e9  # seconds: exceeds the share of time for further snapshots


@dataclass
class CountingState:
    """`DeviceState` double: a log that grows, and bytes that no snapshot has."""

    executed_bytes: int = 0
    dirty_bytes: int = 0
    busy_seconds: float = 0.0
    save_cost: float = 0.0
    retained: int = 0
    saves: int = 0
    unrecoverable: bool = False
    closed: bool = False
    moving: bool = False
    worker: object = field(default_factory=object)
    memory: Any = field(
        default_factory=lambda: SimpleNamespace(
            log_bytes=CAPACITY,
            agent=SimpleNamespace(log_budget=BUDGET),
            client=SimpleNamespace(head=0, operators=0),
        )
    )

    @property
    def log_bytes(self) -> int:
        return self.memory.client.head - self.retained

    @property
    def drained(self) -> bool:
        return self.executed_bytes == self.log_bytes

    @property
    def saved(self) -> bool:
        return not (self.executed_bytes or self.unrecoverable)

    def comes(self, count: int, *, operators: int, dirty: int, executed: int | None = None) -> None:
        """Append bytes of log, with operators, which leave this many bytes dirty."""
        self.memory.client.head += count
        self.memory.client.operators += operators
        self.executed_bytes += count if executed is None else executed
        self.dirty_bytes = dirty

    def free(self) -> None:
        self.retained += self.executed_bytes
        self.executed_bytes = 0

    async def save(self, patient: bool) -> None:
        self.saves, self.unrecoverable, self.dirty_bytes = self.saves + 1, False, 0
        self.free()

    async def truncate_unsaved(self) -> None:
        self.unrecoverable = True
        self.free()


class ScheduledSession:
    """A session under upkeep, and the number of requests for its memory."""

    def __init__(self, *, cost: float = 0.0) -> None:
        self.state, self.asked, self.room = CountingState(save_cost=cost), 0, True
        self.snapshots = SnapshotScheduler(self.state, BUDGET, self._has, lambda: None)  # type: ignore[arg-type]
        if cost:
            self.state.comes(8, operators=1, dirty=1)
            self.take_due(rested=0.0, busy=10.0)
            assert self.state.saves == 1
            self.state.saves = self.asked = 0

    def _has(self, _: int) -> bool:
        self.asked += 1
        return self.room

    def take_due(self, rested: float = 0.0, busy: float = 0.0) -> None:
        self.state.busy_seconds += busy
        asyncio.run(self.snapshots.take_due(rested, self.state.save))


def test_nothing_is_requested_or_done_before_it_is_due() -> None:
    kept = ScheduledSession()
    kept.state.comes(10 * MIB, operators=1000, dirty=MIB)
    kept.take_due(busy=0.1)
    assert (kept.state.saves, kept.asked) == (0, 0)
    kept.take_due(busy=10.0)
    assert (kept.state.saves, kept.asked) == (1, 1)
    kept.take_due(busy=10.0)  # it is saved
    assert (kept.state.saves, kept.asked) == (1, 1)


def test_a_session_that_moves_is_saved_only_if_its_log_requires_it() -> None:
    kept = ScheduledSession()
    kept.state.moving = True
    kept.state.comes(10 * MIB, operators=1000, dirty=MIB)
    kept.take_due(busy=10.0)
    kept.take_due(rested=10.0)
    assert kept.state.saves == 0
    assert kept.snapshots._seconds_left(10.0) == RETRY_SECONDS  # it may rest when it has moved
    kept.state.comes(250 * MIB, operators=1000, dirty=MIB)
    kept.take_due(busy=10.0)
    assert kept.state.saves == 1


def test_a_step_is_not_saved_beyond_its_share_and_forgone_when_its_log_is_full() -> None:
    kept = ScheduledSession(cost=TOO_DEAR)
    kept.state.comes(300 * MIB, operators=10_000, dirty=100 * MIB)
    kept.take_due(busy=10.0)
    assert not kept.state.unrecoverable
    kept.state.comes(100 * MIB, operators=3_000, dirty=100 * MIB)
    kept.take_due(busy=10.0)
    assert kept.state.unrecoverable
    assert (kept.state.saves, kept.asked) == (0, 0)
    assert "faster than 512.0 MiB" in kept.snapshots.obstacle
    kept.take_due(rested=REST_SECONDS)  # no request waits: it costs nothing
    assert (kept.state.unrecoverable, kept.snapshots.obstacle) == (False, "")


@pytest.mark.parametrize("room", [True, False])
def test_an_upload_is_saved_whatever_the_last_snapshot_cost_if_there_is_room(room: bool) -> None:
    kept = ScheduledSession(cost=TOO_DEAR)
    kept.room = room
    for _ in range(64):
        dirty = kept.state.dirty_bytes + 16 * MIB
        kept.state.comes(16 * MIB, operators=0, dirty=dirty)
        kept.take_due(busy=0.005)
    assert kept.state.saves == (3 if room else 0)
    assert kept.state.unrecoverable is not room
    assert ("host memory" in kept.snapshots.obstacle) is not room


def test_a_large_tensor_is_saved_only_before_its_log_would_be_lost() -> None:
    kept, most = ScheduledSession(cost=TOO_DEAR), 0
    for _ in range(64):
        kept.state.comes(16 * MIB, operators=0, dirty=1024 * MIB)
        most = max(most, kept.state.log_bytes)
        kept.take_due(busy=0.005)
        assert not kept.state.unrecoverable
    assert kept.state.saves == 2
    assert most > FULL * CAPACITY


def test_an_upload_delays_no_later_snapshot() -> None:
    kept = ScheduledSession()
    kept.state.save_cost = TOO_DEAR
    kept.state.comes(300 * MIB, operators=0, dirty=300 * MIB)
    kept.take_due(busy=0.1)
    kept.state.comes(MIB, operators=1000, dirty=300 * MIB)
    kept.take_due(busy=10.0)
    assert kept.state.saves == 2


def test_a_worker_that_is_behind_is_neither_saved_nor_robbed_of_its_log() -> None:
    kept = ScheduledSession(cost=TOO_DEAR)
    for operators in (0, 100_000):
        kept.state.comes(250 * MIB, operators=operators, dirty=MIB, executed=MIB)
        kept.take_due()
        assert (kept.state.saves, kept.state.unrecoverable, kept.asked) == (0, False, 0)
    assert kept.snapshots._seconds_left(0.0) == BEHIND_SECONDS
    kept.state.executed_bytes = 400 * MIB
    kept.take_due()
    assert kept.state.unrecoverable


@pytest.mark.parametrize(
    ("came", "budget"),
    [(0, 0), (MIB, BUDGET), (300 * MIB, int(FULL * CAPACITY)), (450 * MIB, CAPACITY)],
)
def test_a_client_rings_when_its_log_has_come_to_the_next_mark(came: int, budget: int) -> None:
    kept = ScheduledSession(cost=TOO_DEAR)
    if came:
        kept.state.comes(came, operators=came // 200, dirty=MIB, executed=8)
    kept.take_due()
    assert kept.state.memory.agent.log_budget == budget


def test_a_snapshot_that_fails_is_tried_again() -> None:
    kept = ScheduledSession()
    kept.state.comes(MIB, operators=1000, dirty=MIB)
    kept.state.busy_seconds = 10.0

    async def refuse(patient: bool) -> None:
        raise WorkerError("no memory")

    asyncio.run(kept.snapshots.take_due(0.0, refuse))
    assert (kept.snapshots._seconds_left(0.0), kept.state.saves) == (1.0, 0)
    kept.take_due()
    assert kept.state.saves == 1
