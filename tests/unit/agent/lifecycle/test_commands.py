"""The fate of a command whose caller disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from kernelproxy.agent.lifecycle.commands import Commands
from kernelproxy.agent.residency.migrate import Migrator


class LockedSession:
    """Session double with what waiting for its lock needs."""

    def __init__(self) -> None:
        self.id, self.closing, self.lock = "0123abcd", False, asyncio.Lock()
        self.device_state = SimpleNamespace(expedite=lambda *_: None)
        self.checked, self.told = 0, list[str]()
        self.allocator = SimpleNamespace(device=SimpleNamespace(id="cpu:0"))
        self.device_state.worker = self.allocator

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self.lock:
            yield

    def check_usable(self) -> None:
        self.checked += 1

    def request_reconcile(self) -> None:
        pass

    def happened(self, kind: str, text: str) -> None:
        self.told.append(text)


async def request_and_disconnect(*, started: bool) -> list[str]:
    """Call a command and disconnect; return what was done nevertheless."""
    session, continuing = LockedSession(), asyncio.Event()
    none: Any = None
    core: Any = session
    migrator: Any = Migrator(core, core.device_state, none, none, none)
    commands = Commands(
        core, core.device_state, none, none, none, migrator, none, describe=lambda: none
    )

    async def move(*_: Any) -> None:
        await continuing.wait()

    migrator._move_to = move
    there: Any = SimpleNamespace(device=SimpleNamespace(id="cpu:1"))
    if not started:
        await session.lock.acquire()
    asking = asyncio.create_task(commands.migrate(there))
    while not (session.checked if started else commands.running):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (task,) = commands.running
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    continuing.set()
    if not started:
        session.lock.release()
    await asyncio.wait({task})
    assert task.cancelled() is not started
    assert not session.lock.locked()
    assert not commands.running
    assert bool(session.checked) is started
    return session.told


def test_a_command_that_waits_for_the_lock_is_withdrawn() -> None:
    assert asyncio.run(request_and_disconnect(started=False)) == []


def test_a_command_that_has_started_is_carried_out() -> None:
    told = asyncio.run(request_and_disconnect(started=True))
    assert told == ["Moved from Simulated GPU 0 to Simulated GPU 1."]
