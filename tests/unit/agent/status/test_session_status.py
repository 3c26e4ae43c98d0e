"""A status request changes nothing: neither a session, nor its records, nor its pages."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.answers import Answers
from kernelproxy.agent.session.states import State
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.status import activity_store
from kernelproxy.agent.supervisor.fdstore import PersistedSession
from kernelproxy.common import paths
from kernelproxy.common.protocol import OpenSession
from kernelproxy.common.shared_memory import PAGE_BYTES, ClientPage
from kernelproxy.common.sqlite_writer import opened
from kernelproxy.devices import configured_devices

CELLS_RUNNING = ClientPage.cells_running.offset


class CountingSupervisor:
    """Supervisor double that counts the records it gets."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, persisted: PersistedSession) -> None:
        self.count += 1

    def drop(self, session: str) -> None:
        pass


class StandingWorker:
    """Worker double that stands still."""

    pid, broken, hung, corrupt = 1, False, "", None

    async def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def states_of(session: str) -> list[str]:
    """Return the states of a session in the activity record."""
    with opened(paths.runtime_dir() / activity_store.NAME) as database:
        query = "SELECT state FROM changes WHERE session = ? ORDER BY number"
        return [state for (state,) in database.execute(query, (session,))]


async def changes_nothing(agent: Agent, kept: CountingSupervisor) -> None:
    request = OpenSession("n", "k", sys.executable)
    allocator = next(iter(agent.allocators.values()))
    state = DeviceState("s", allocator.device, agent.settings)
    session = agent._add("s", request, os.getuid(), allocator, state)
    state.worker = StandingWorker()  # type: ignore[assignment]
    memory = state.memory
    client = memory.client.memory
    client[CELLS_RUNNING : CELLS_RUNNING + 4] = (1).to_bytes(4, "little")
    session.core.reconcile_due.clear()
    pages = [bytes(page.memory[:PAGE_BYTES]) for page in (memory.client, memory.agent)]
    before = kept.count, session.core.state, session.core.reason, session.core.since
    for _ in range(3):
        (shown,) = Answers(agent).status(os.getuid()).sessions
        assert shown["state"] == "running"
    after = kept.count, session.core.state, session.core.reason, session.core.since
    assert after == before
    assert session.core.state is State.IDLE
    assert not session.core.reconcile_due.is_set()
    assert [bytes(page.memory[:PAGE_BYTES]) for page in (memory.client, memory.agent)] == pages


@pytest.mark.usefixtures("runtime_dir")
def test_a_status_request_changes_nothing() -> None:
    """The pages show another state than the one that the session was in when it last reconciled."""

    async def ask() -> None:
        kept = CountingSupervisor()
        agent = Agent(configured_devices(), AgentSettings(), kept, lambda: None)  # type: ignore[arg-type]
        agent.recorder.begin(kept=False)
        try:
            await changes_nothing(agent, kept)
        finally:
            await agent.close()

    asyncio.run(ask())
    assert states_of("s") == ["unused", "ended"]
