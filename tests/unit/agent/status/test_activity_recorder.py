"""The record counts what workers have executed: once, and on the device where it happened."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.session.states import State
from kernelproxy.agent.status import activity_recorder, activity_store, session_status
from kernelproxy.agent.status.activity_recorder import ActivityRecorder
from tests.unit.agent.status.test_activity_store import DEVICES, NOW

ALLOCATORS: dict[str, Any] = {
    name: SimpleNamespace(
        device=SimpleNamespace(id=name, kind=SimpleNamespace(name=kind), memory_total=total)
    )
    for name, kind, total in DEVICES
}


class RecordedSession:
    """Session double with what the record uses, in a time that a test sets."""

    def __init__(self, name: str, device: str = "cpu:0") -> None:
        self.id = self.name = name
        self.owner, self.user, self.reason = os.getuid(), "ada", "Suspended."
        self.state, self.allocator = State.IDLE, ALLOCATORS[device]
        self.core = self.observed = self
        self.device_state = SimpleNamespace(closed=False, busy_seconds=0.0, worker=self)

    def user_visible(self) -> tuple[State, str]:
        return self.state, ""


class RecordedDay:
    """Sessions, and the record to which they and their clock report."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.now = directory, NOW
        self.sessions: dict[str, Any] = {}
        monkeypatch.setattr(activity_recorder, "time", SimpleNamespace(
            time=lambda: self.now, monotonic=lambda: self.now
        ))  # fmt: skip
        monkeypatch.setattr(session_status, "memory_used", lambda session: 0)
        self.begin(kept=False)

    def begin(self, *, kept: bool) -> None:
        """Start an agent, which finds the existing sessions."""
        record = activity_store.ActivityStore(self.directory)
        self.recorder = ActivityRecorder(self.sessions, ALLOCATORS, record)
        self.recorder.begin(kept=kept)
        for each in self.sessions.values():
            self.recorder.opened(each)

    def open(self, name: str, device: str = "cpu:0") -> RecordedSession:
        self.sessions[name] = session = RecordedSession(name, device)
        self.recorder.opened(session)  # type: ignore[arg-type]
        return session

    def become(self, session: Any, state: State, device: str = "cpu:0") -> None:
        session.state, session.allocator = state, ALLOCATORS[device]
        self.recorder.state_changed(session)

    def pass_by(self, seconds: float, **executed: float) -> None:
        """Let time pass in which sessions executed for this long."""
        self.now += seconds
        for name, each in executed.items():
            self.sessions[name].device_state.busy_seconds += each

    async def end(self) -> dict[str, float]:
        """End the agent; return for how long devices have executed by the record."""
        await self.recorder.close()
        found = activity_store.read(self.directory, NOW, self.now, 1.0, os.getuid())
        return {each["id"]: each["executed"] for each in found["devices"]}


def test_device_seconds_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        day = RecordedDay(tmp_path, monkeypatch)
        one, two = day.open("one"), day.open("two")
        day.become(one, State.RUNNING)
        day.pass_by(100, one=20)  # a cell that mostly computes in Python
        day.become(two, State.RUNNING)  # packed: both at once
        day.pass_by(30, one=15, two=15)
        for _ in range(10):  # turns
            day.become(one, State.QUEUED)
            day.pass_by(1, two=1)
            day.become(one, State.RUNNING)
            day.become(two, State.QUEUED)
            day.pass_by(1, one=0.5)
            day.become(two, State.RUNNING)
        day.become(two, State.SUSPENDED)
        day.pass_by(1000)
        day.become(two, State.RESTORING)
        day.become(two, State.RUNNING)
        day.pass_by(8, two=4)
        day.become(two, State.MIGRATING)
        day.become(two, State.RUNNING, "cpu:1")
        day.pass_by(10, two=6, one=1)
        first = {"cpu:0": 20 + 30 + 10 + 5 + 4 + 1, "cpu:1": 6}
        assert await day.end() == first
        # Another agent continues with them, and counts nothing twice.
        day.begin(kept=True)
        day.pass_by(10, one=2, two=3)
        day.recorder.note_executed(one)  # type: ignore[arg-type]
        del day.sessions["one"]
        one.device_state.closed = True
        day.recorder.closed(one)  # type: ignore[arg-type]
        found = await day.end()
        assert found == {"cpu:0": first["cpu:0"] + 2, "cpu:1": first["cpu:1"] + 3}
        total = one.device_state.busy_seconds + two.device_state.busy_seconds
        assert sum(found.values()) == total  # which status and metrics show

    asyncio.run(run())
