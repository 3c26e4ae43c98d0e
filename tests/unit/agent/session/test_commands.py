"""The fate of a verb whose caller disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.session.commands import Verbs
from kernelproxy.agent.status import session_status


class LockedSession:
    """Session double with what waiting for its lock needs."""

    def __init__(self) -> None:
        self.id, self.closing, self.lock = "0123abcd", False, asyncio.Lock()
        self.device_state = SimpleNamespace(hurry=lambda: None)
        self.checked, self.told = 0, list[str]()
        self.room = SimpleNamespace(device=SimpleNamespace(id="cpu:0"))
        self.device_state.worker = self.room
        self.chronicle = SimpleNamespace(happened=lambda *said: self.told.append(said[-1]))

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self.lock:
            yield

    def check_usable(self) -> None:
        self.checked += 1

    def look(self) -> None:
        pass


async def ask_and_hang_up(*, begun: bool) -> list[str]:
    """Call a verb and disconnect; return what was done nevertheless."""
    session, going_on = LockedSession(), asyncio.Event()
    verbs: Any = Verbs(session)  # type: ignore[arg-type]

    async def move(*_: Any) -> None:
        await going_on.wait()

    verbs._move_to = move
    there: Any = SimpleNamespace(device=SimpleNamespace(id="cpu:1"))
    if not begun:
        await session.lock.acquire()
    asking = asyncio.create_task(verbs.migrate(there))
    while not (session.checked if begun else verbs.running):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    (task,) = verbs.running
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    going_on.set()
    if not begun:
        session.lock.release()
    await asyncio.wait({task})
    assert task.cancelled() is not begun
    assert not session.lock.locked()
    assert not verbs.running
    assert bool(session.checked) is begun
    return session.told


def test_a_verb_that_waits_for_the_lock_is_withdrawn() -> None:
    assert asyncio.run(ask_and_hang_up(begun=False)) == []


def test_a_verb_that_has_begun_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_status, "describe_session", lambda session: {})
    told = asyncio.run(ask_and_hang_up(begun=True))
    assert told == ["Moved from Simulated GPU 0 to Simulated GPU 1."]
