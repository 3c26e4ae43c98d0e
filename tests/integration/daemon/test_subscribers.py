"""Subscribers of a real daemon receive changes, as far as they are allowed to see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.framing import send_message
from kernelproxy.common.protocol import (
    Changed,
    CloseSession,
    MigrateRequest,
    Pin,
    Resume,
    StatusReply,
    StatusRequest,
    Suspend,
    WatchRequest,
)
from tests.doubles.session.client import WAIT_SECONDS
from tests.integration.conftest import ToyHost

TWO = "cpu:1GiB@1,cpu:1GiB@1"
MIB = 1 << 20
ENGINE: dict[str, object] = {"engine": {}}
StartHost = Callable[..., ToyHost]


class FrontEnd:
    """Applies the updates that it receives, as a front end does."""

    def __init__(self, session: str = "") -> None:
        self._control = agent_client.connect(start=False)
        try:
            reply = self._control.expect(StatusReply, WatchRequest(session), WAIT_SECONDS)
        except BaseException:
            self._control.close()
            raise
        self.sessions = {each["id"]: each for each in reply.sessions}
        self.devices = {each["id"]: each for each in reply.devices}
        self.notified: list[Changed] = []

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()

    def receive(self) -> Changed:
        message = self._control.more(WAIT_SECONDS)
        assert isinstance(message, Changed)
        self.notified.append(message)
        self.sessions |= {each["id"]: each for each in message.sessions}
        self.devices |= {each["id"]: each for each in message.devices}
        for each in message.gone:
            self.sessions.pop(each, None)
        return message

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.receive()

    def sees(self, session: str, **fields: object) -> None:
        """Wait until a session is seen with these fields."""

        def is_seen() -> bool:
            found: dict[str, Any] = {**self.sessions.get(session, {})}
            return all(found.get(name) == value for name, value in fields.items())

        self.until(is_seen)


def test_each_change_reaches_all_subscribers(toy_host: StartHost) -> None:
    host = toy_host(TWO, idle_timeout=0, **ENGINE)
    with FrontEnd() as one, FrontEnd() as other:
        assert one.sessions == {}
        assert set(one.devices) == {"cpu:0", "cpu:1"}
        client = host.client("mine", device="cpu:0")
        neighbour = host.client("neighbour", device="cpu:0")
        name = client.session
        for each in (one, other):
            each.sees(name, state="idle", name="mine", memory=0)
            each.sees(neighbour.session, name="neighbour")
        with client.cell():
            client.use(100 * MIB)
            client.add(1)
            assert client.read() == client.state
            one.sees(name, state="running", memory=100 * MIB)
            assert one.devices["cpu:0"]["memory_used"] == 100 * MIB
        one.sees(name, state="idle")
        host.call(Suspend(name))
        one.sees(name, state="suspended", tier="parked", memory=0, worker_pid=None)
        assert one.devices["cpu:0"]["memory_used"] == 0
        host.call(Resume(name))
        one.sees(name, state="idle", tier="resident")
        host.call(Pin(name, True))
        one.sees(name, pinned=True)
        host.call(MigrateRequest(name, "cpu:1"))
        one.sees(name, device="cpu:1", state="idle")
        one.until(lambda: name in one.devices["cpu:1"]["sessions"])
        host.call(CloseSession(name))
        one.until(lambda: name not in one.sessions)
        # A subscriber that reads late receives fewer messages, and ends in the same state.
        other.until(lambda: name not in other.sessions)
        other.until(lambda: other.devices == one.devices)
        assert len(other.notified) <= len(one.notified)
        assert set(other.sessions) == {neighbour.session}


def test_a_subscriber_of_one_session_receives_no_other(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0, **ENGINE)
    mine, other = host.client("mine"), host.client("other")
    with FrontEnd("mine") as watcher:
        assert list(watcher.sessions) == [mine.session]
        assert len(watcher.devices["cpu:0"]["sessions"]) == 2
        host.work(other, MIB)
        host.call(Suspend(other.session))
        host.call(Suspend(mine.session))
        watcher.sees(mine.session, state="suspended")
        assert {e["id"] for notified in watcher.notified for e in notified.sessions} == {
            mine.session
        }
    with pytest.raises(ControlError, match="no session 'nobody'"):
        FrontEnd("nobody")


def test_memory_is_reported_while_a_cell_runs(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0, **ENGINE)
    client = host.client()
    with FrontEnd() as watcher, client.cell():
        for used in (64 * MIB, 256 * MIB, 128 * MIB):
            client.use(used)
            client.add(1)
            watcher.sees(client.session, state="running", memory=used)


def test_the_next_agent_is_watched_when_one_was_killed(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0, **ENGINE)
    client = host.client()
    host.work(client, MIB)
    with FrontEnd() as before:
        host.kill_agent()
        with pytest.raises(ControlError) as ended:
            before.until(lambda: False)
        assert ended.value.reason == "no-daemon"
    with FrontEnd() as watcher:
        assert list(watcher.sessions) == [client.session]
        client.add(1)
        assert client.read() == client.state
        watcher.sees(client.session, state="idle", tier="resident")
        host.call(Suspend(client.session))
        watcher.sees(client.session, state="suspended")


def test_a_subscriber_that_does_not_read_delays_no_other_and_the_daemon_exits(
    toy_host: StartHost,
) -> None:
    host = toy_host(linger=0.1, idle_timeout=0, **ENGINE)
    session = host.open()
    with agent_client.connect(start=False) as connection:
        deaf = connection.detach()
    with deaf, FrontEnd() as watcher:
        send_message(deaf, WatchRequest())
        for index in range(50):
            host.call(Pin(session, index % 2 == 0))
        watcher.sees(session, pinned=False)
        host.call(CloseSession(session))
        watcher.until(lambda: not watcher.sessions)
        host.process.wait(WAIT_SECONDS)  # a subscriber does not keep it alive


def test_changes_without_subscribers_are_known_later(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0, **ENGINE)
    client = host.client()
    with FrontEnd() as watcher:
        watcher.sees(client.session, state="idle")
    host.work(client, MIB)
    with FrontEnd() as watcher:
        found = {each["id"]: each for each in host.call(StatusRequest()).sessions}
        assert watcher.sessions[client.session]["state"] == found[client.session]["state"]
        host.call(Suspend(client.session))
        watcher.sees(client.session, state="suspended")
