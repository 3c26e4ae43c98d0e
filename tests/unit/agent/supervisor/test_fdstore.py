"""State that an agent adopts from a dead one, and deposits that it has to refuse."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.answers import Answers
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.supervisor.fdstore import RECORD_VERSION, PersistedSession
from kernelproxy.agent.supervisor.supervisor import end_processes
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.shared_memory import AgentPage, Presence, SessionMemory
from kernelproxy.devices import configured_devices

AUTOMATIC: dict[str, Any] = {
    "rule": {"every": 60.0, "cells": 20, "keep": 5},
    "saved": 1,
    "tried": 1,
    "tried_at": 1.0,
    "problem": "The disk is full.",
}


class FakeSupervisor:
    """Supervisor double that records calls."""

    def __init__(self) -> None:
        self.put_: list[PersistedSession] = []
        self.dropped: list[str] = []

    def put(self, persisted: PersistedSession) -> None:
        self.put_.append(persisted)

    def drop(self, session: str) -> None:
        self.dropped.append(session)


def state_record(**changes: Any) -> dict[str, Any]:
    state = DeviceState("s", configured_devices()[0], AgentSettings())
    found = state.record()[0] | changes
    state.memory.close()
    return found


def record(**changes: Any) -> dict[str, Any]:
    return {
        "version": RECORD_VERSION,
        "request": {"name": "n", "kernel_id": "k", "python": sys.executable, "key": "1"},
        "owner": os.getuid(),
        "device": "cpu:0",
        "kernel": {
            "pid": os.getpid(),
            "torch_version": "2",
            "cells_before": 1,
            "wake": None,
            "may_end": False,
            "awaits_another": False,
        },
        "hibernation": {"stage": None, "directory": None},
        "state": state_record(),
        "is": "suspended",
        "reason": "Rests.",
        "since": 1.0,
        "hold": None,
        "automatic": AUTOMATIC,
        "fresh": False,
        "wanted": {"pinned": False, "tier": None},
    } | changes


def duplicates(memory: SessionMemory) -> list[tuple[str, int]]:
    return [(name, os.dup(fd)) for name, fd in zip(memory.NAMES, memory.fds, strict=True)]


def adopt(
    record: dict[str, Any], retained: int = 0, *, worker_remains: bool = False
) -> tuple[list[SessionView], str]:
    """Let an agent adopt one session; return its sessions, and the reason in the client's page."""
    memory = SessionMemory(1 << 16)
    memory.agent.retained = retained
    page = AgentPage(memory.agent_fd, writable=False)
    fds = duplicates(memory)
    fds.append(("watched", os.pidfd_open(os.getpid())))
    memory.close()
    kept = FakeSupervisor()

    async def take_over() -> tuple[list[SessionView], str]:
        agent = Agent(configured_devices(), AgentSettings(), kept, lambda: None)  # type: ignore[arg-type]
        agent.adopt([PersistedSession("s", record, fds, worker_remains)])
        sessions = Answers(agent).status(0).sessions
        ended = page.reason if page.presence == Presence.ENDED else ""
        await agent.close()
        return sessions, ended

    try:
        found = asyncio.run(take_over())
        assert kept.dropped == ["s"]
        return found
    finally:
        page.close()


def test_a_suspended_session_is_recovered_unchanged() -> None:
    (session,), ended = adopt(record())
    assert ended == ""
    assert (session["id"], session["state"], session["reason"]) == ("s", "suspended", "Rests.")
    assert (session["kernel_pid"], session["kernel_id"]) == (os.getpid(), "k")
    assert session["automatic"] == {**AUTOMATIC["rule"], "problem": AUTOMATIC["problem"]}


@pytest.mark.parametrize(
    ("changes", "retained", "why"),
    [
        ({"version": 0}, 0, "jupyter_sing was changed meanwhile"),
        ({"device": "cuda:9"}, 0, "the device cuda:9 is gone"),
        ({}, 100, "what it did last is in no snapshot"),
        ({"state": {}}, 0, "'snapshot'"),
    ],
)
def test_a_session_that_cannot_be_recovered_ends_with_a_reason(
    changes: dict[str, Any], retained: int, why: str
) -> None:
    sessions, ended = adopt(record(**changes), retained)
    assert sessions == []
    assert ended == f"It did not outlive its daemon: {why}."


def test_a_session_with_a_worker_that_does_not_end_ends_alone() -> None:
    sessions, ended = adopt(record(), worker_remains=True)
    assert sessions == []
    assert ended == "It did not outlive its daemon: its device process cannot be ended."


def test_a_snapshot_that_was_deposited_is_published() -> None:
    """The agent died between the two steps of `DeviceState.save`."""
    memory = SessionMemory(1 << 16)
    memory.client.head = 300
    fds = duplicates(memory)
    memory.close()
    fds.append(("snapshot", os.memfd_create("toy-snapshot")))
    state = state_record(
        snapshot=[200, 1],
        skip=[250],
        why=["CUDA error: device-side assert triggered"],
        careful_until=260,
        replay_grant=5,
        epoch=3,
    )
    (device, *_) = configured_devices()

    async def go_on() -> None:
        found = DeviceState.adopt(
            PersistedSession("s", record(state=state), fds), device, AgentSettings()
        )
        assert (found.position, found.memory.agent.retained) == (200, 200)
        assert found.record()[0] == state
        assert {name for name, _ in found.record()[1]} == {*memory.NAMES, "snapshot"}
        await found.close()

    asyncio.run(go_on())


def test_stopped_processes_are_ended() -> None:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    pidfds = [os.pidfd_open(each.pid) for each in processes]
    processes[0].send_signal(signal.SIGSTOP)
    assert end_processes(pidfds) == []
    assert end_processes(pidfds) == []  # processes that have ended are not waited for
    for process, pidfd in zip(processes, pidfds, strict=True):
        assert process.wait() == -signal.SIGKILL
        os.close(pidfd)
