"""Sessions that are asked to spill, and sessions that are asked again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kernelproxy.agent import settings
from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill import host_memory
from kernelproxy.agent.spill.host_memory import HostMemory
from kernelproxy.agent.spill.spill_policy import SuspendedState
from kernelproxy.agent.spill.spill_store import SpillStore
from kernelproxy.common.errors import ControlError, StoreError
from kernelproxy.common.units import MIB


class SpillableSession:
    """Session double that gives prepared answers when it is to spill."""

    host_bytes = 100
    user = "ada"

    def __init__(self) -> None:
        self.id, self.lock_taken, self.asked = "guest", False, 0
        self.answers: list[bool | StoreError] = []

    def as_suspended(self) -> SuspendedState | None:
        return None if self.lock_taken else SuspendedState(self.id, self.host_bytes, 0.0)

    async def spill(self) -> bool:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, StoreError):
            raise answer
        return answer


Play = Callable[[HostMemory, SpillableSession], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Play], SpillableSession]:
    def run(play: Play) -> SpillableSession:
        guest = SpillableSession()

        async def body() -> None:
            cold = SpillStore(tmp_path / "states", 1 << 30, DaemonId(tmp_path))
            host = HostMemory(lambda: 1, 0.0, cold, lambda: [guest])
            await play(host, guest)
            await host.close()

        asyncio.run(body())
        return guest

    return run


async def settle() -> None:
    """Let all tasks make progress."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_locked_session_is_spilled_when_its_lock_is_free(
    run: Callable[[Play], SpillableSession],
) -> None:
    async def play(host: HostMemory, guest: SpillableSession) -> None:
        guest.lock_taken, guest.answers = True, [True]
        host.changed()
        await settle()
        assert guest.asked == 0
        guest.lock_taken = False
        host.decided(guest)
        await settle()

    assert run(play).asked == 1


def test_a_session_used_meanwhile_is_tried_again_when_its_lock_is_free(
    run: Callable[[Play], SpillableSession],
) -> None:
    async def play(host: HostMemory, guest: SpillableSession) -> None:
        guest.answers = [False, True]
        host.changed()
        await settle()
        assert guest.asked == 1
        host.decided(guest)
        await settle()
        host.decided(guest)  # it is on disk, so it is not asked
        await settle()

    assert run(play).asked == 2


def test_a_session_that_could_not_be_spilled_is_skipped_for_a_while(
    run: Callable[[Play], SpillableSession],
) -> None:
    async def play(host: HostMemory, guest: SpillableSession) -> None:
        guest.answers = [StoreError("There is no room.", "quota")]
        host.changed()
        await settle()
        host.decided(guest)
        host.changed()
        await settle()

    assert run(play).asked == 1


def test_the_budget_follows_the_memory_of_a_machine_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_physical_memory", lambda: 200)
    found = AgentSettings()
    cold = SpillStore(tmp_path / "states", 0, DaemonId(tmp_path))
    host = HostMemory(found.host_budget, 0.0, cold, list)
    assert (host.has(100), host.has(101)) == (True, False)
    monkeypatch.setattr(settings, "_physical_memory", lambda: 400)
    assert (host.has(200), host.has(201)) == (True, False)
    assert AgentSettings(host_memory=7).host_budget() == 7  # as the user wants


def test_the_machine_is_asked_before_a_state_is_saved(
    run: Callable[[Play], SpillableSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [100]
    monkeypatch.setattr(host_memory, "MARGIN_BYTES", 10)
    monkeypatch.setattr(host_memory, "available", lambda: free[0])

    async def play(host: HostMemory, guest: SpillableSession) -> None:
        async with host.admitted(guest, 90):
            assert guest.asked == 0
        guest.answers = [False]
        with pytest.raises(ControlError, match="too little free memory"):
            async with host.admitted(guest, 91):
                pass
        assert guest.asked == 1  # others are spilled before anything is refused
        guest.answers = [True]
        spill = guest.spill

        async def spilled() -> bool:
            free[0] = 200
            return await spill()

        monkeypatch.setattr(guest, "spill", spilled)
        async with host.admitted(guest, 91):
            pass

    assert run(play).asked == 2


def test_the_system_says_how_much_memory_is_left() -> None:
    assert MIB < host_memory.available() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_refused_spill_is_retried_without_any_change(
    run: Callable[[Play], SpillableSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(host_memory, "POLL_SECONDS_MIN", 0.01)

    async def play(host: HostMemory, guest: SpillableSession) -> None:
        guest.answers = [StoreError("There is no space.", "full"), True]
        host.changed()
        async with asyncio.timeout(120):
            while guest.answers:
                await asyncio.sleep(0.01)

    assert run(play).asked == 2
