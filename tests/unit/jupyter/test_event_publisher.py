"""Updates of the daemon become events, even if the daemon dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_events import EventLogger

from jupyter_sing.server import event_publisher
from jupyter_sing.server.event_publisher import Feed
from jupyter_sing.server.extension import EVENT_SCHEMA
from jupyter_sing.server.notebooks import NotebookNames
from kernelproxy.common.protocol.views import ProgressView
from kernelproxy.provisioning.events import EVENT_ID
from tests.unit.fake_daemon import SECONDS_MAX, SESSION, FakeDaemon

PROGRESS: ProgressView = {"verb": "checkpoint", "checkpoint": "mine", "done": 1, "total": 2}


class PublishedSessions:
    """Session manager double of the server, with one notebook."""

    def __init__(self) -> None:
        self.path = "lessons/digits.ipynb"

    async def list_sessions(self) -> list[dict[str, Any]]:
        return [{"kernel": {"id": SESSION["kernel_id"]}, "path": self.path}]


class Events:
    """Records the events of an event bus with our schema."""

    def __init__(self) -> None:
        self.manager = PublishedSessions()
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._logger = EventLogger()
        self._logger.register_event_schema(EVENT_SCHEMA)
        self._logger.add_listener(schema_id=EVENT_ID, listener=self._listen)
        self.feed = Feed(self._emit, NotebookNames(self.manager), logging.getLogger("test"))

    def _emit(self, data: dict[str, Any]) -> None:
        self._logger.emit(schema_id=EVENT_ID, data=data)

    async def _listen(self, logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        self._said.put_nowait(data)

    async def next(self) -> dict[str, Any]:
        found = await asyncio.wait_for(self._said.get(), SECONDS_MAX)
        return {each: value for each, value in found.items() if not each.startswith("__")}


@asynccontextmanager
async def watched() -> AsyncIterator[Events]:
    events = Events()
    events.feed.start()
    events.feed.start()  # idempotent
    try:
        yield events
    finally:
        await events.feed.stop()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "POLL_SECONDS", 0.01)


def test_change_of_a_session_is_an_event(fake_daemon: FakeDaemon) -> None:
    async def check() -> None:
        async with watched() as events:
            first = await events.next()
            assert first == {
                "session": SESSION["id"], "kernel_id": SESSION["kernel_id"], "state": "idle",
                "tier": "resident", "device": "cpu:0", "reason": "Idle.", "owner": "ada",
                "name": "lessons/digits.ipynb", "memory": SESSION["memory"], "pinned": False,
                "priority": None, "served_as": "standard", "recoverable": True,
                "queued_for": 0.0, "queue_position": None, "expected_wait": None,
                "last_checkpoint": None, "suspended_by": None, "suspended_at": None,
                "shared": None, "promised": 0.7, "job": "", "rank": None, "ranks": None,
            }  # fmt: skip
            fake_daemon.tell(SESSION | {"state": "queued", "queue_position": 2})
            assert await events.next() == first | {"state": "queued", "queue_position": 2}
            fake_daemon.tell(SESSION | {"progress": PROGRESS, "device": None})
            assert await events.next() == first | {"progress": PROGRESS, "device": ""}
            fake_daemon.tell(SESSION, gone=["unknown"])
            assert await events.next() == first
            fake_daemon.tell(gone=[SESSION["id"]])
            assert await events.next() == first | {"ended": True}

    asyncio.run(check())


def test_event_of_a_renamed_notebook_has_the_new_name(fake_daemon: FakeDaemon) -> None:
    async def check() -> None:
        async with watched() as events:
            assert (await events.next())["name"] == "lessons/digits.ipynb"
            events.manager.path = "lessons/letters.ipynb"
            fake_daemon.tell(SESSION | {"state": "running"})
            assert (await events.next())["name"] == "lessons/letters.ipynb"
            fake_daemon.tell(gone=[SESSION["id"]])
            assert (await events.next())["name"] == "lessons/letters.ipynb"

    asyncio.run(check())


def test_publisher_follows_the_next_daemon(runtime_dir: Path) -> None:
    path = runtime_dir / "agent.sock"
    other = SESSION | {"id": "other", "kernel_id": ""}

    async def check() -> None:
        async with watched() as events:
            for session in (SESSION, other):
                daemon = FakeDaemon(path)
                daemon.sessions = {session["id"]: session}
                try:
                    assert (await events.next())["session"] == session["id"]
                    # Only the connection breaks, and updates are missed.
                    changed = session | {"state": "suspended"}
                    daemon.sessions = {"third": SESSION | {"id": "third"}, session["id"]: changed}
                    daemon.drop_watchers()
                    assert (await events.next())["session"] == "third"
                    assert (await events.next())["state"] == "suspended"
                    daemon.sessions = {session["id"]: changed}
                    daemon.drop_watchers()
                    ended = await events.next()
                    assert (ended["session"], ended["ended"]) == ("third", True)
                    assert (await events.next())["session"] == session["id"]
                finally:
                    await asyncio.to_thread(daemon.close)
                    path.unlink()
                assert (await events.next())["ended"] is True

    asyncio.run(check())


def test_failing_event_does_not_stop_the_publisher(
    fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    fake_daemon.sessions[SESSION["id"]] = SESSION | {"state": "unheard of"}

    async def check() -> None:
        async with watched() as events:
            for failures in (1, 2):
                fake_daemon.tell(SESSION | {"state": "unheard of"})
                while len(caplog.records) < failures:
                    await asyncio.sleep(0.01)
                fake_daemon.sessions[SESSION["id"]] = SESSION
                assert (await events.next())["state"] == "idle"

    asyncio.run(check())
    assert [each.message for each in caplog.records] == [
        "jupyter_sing: changes of sessions cannot be published"
    ] * 2
