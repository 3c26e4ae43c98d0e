"""The activity record of a real daemon is what sessions have done, also after it was killed."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import pytest

from kernelproxy.agent.status import activity_store
from kernelproxy.common import paths
from kernelproxy.common.protocol import (
    ActivityReply,
    ActivityRequest,
    CloseSession,
    MigrateRequest,
    Resume,
    Suspend,
)
from kernelproxy.common.protocol.views import ActivityView
from kernelproxy.common.sqlite_writer import opened
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

TWO = "cpu:1GiB@1,cpu:1GiB@1"
MIB = 1 << 20
SETTINGS: dict[str, object] = {"engine": {}, "idle_timeout": 0}
StartHost = Callable[..., ToyHost]


def recorded() -> ActivityView:
    """Return the content of the record."""
    return activity_store.read(paths.runtime_dir(), 0.0, time.time(), 0.0, os.getuid())


def kinds(session: str) -> list[str]:
    return [each["kind"] for each in recorded()["events"] if each["session"] == session]


def held(session: str) -> list[tuple[str, str]]:
    """Return devices and states of a session in their order, without repetitions."""
    spans = [
        each for e in recorded()["devices"] for each in e["held"] if each["session"] == session
    ]
    spans.sort(key=lambda each: each["start"])
    for one, other in itertools.pairwise(spans):
        assert one["end"] <= other["start"]
    found = [(each["device"], each["state"]) for each in spans]
    return [each for each, _ in itertools.groupby(found)]


def changes(session: str) -> list[str]:
    """Return all states of a session that are recorded, in their order."""
    query = "SELECT state FROM changes WHERE session = ? ORDER BY number"
    with opened(paths.runtime_dir() / activity_store.NAME) as database:
        return [state for (state,) in database.execute(query, (session,))]


def test_the_record_lists_what_sessions_have_done(toy_host: StartHost) -> None:
    host = toy_host(TWO, **SETTINGS)
    client = host.client("mine", device="cpu:0")
    name = client.session
    host.work(client, 100 * MIB)

    def most() -> float:
        (device, _) = recorded()["devices"]
        return max(count for _, count in device["memory"])

    wait_until(lambda: most() == 100 * MIB)
    host.call(Suspend(name, "Suspended for a test"))
    host.call(Resume(name))
    host.call(MigrateRequest(name, "cpu:1"))
    executed = host.session(client)["gpu_seconds"]
    host.call(CloseSession(name))
    wait_until(lambda: changes(name)[-1:] == ["ended"])
    assert kinds(name) == ["suspended", "resumed", "migrated"]
    assert executed > 0
    assert sum(each["executed"] for each in recorded()["devices"]) == pytest.approx(executed)
    first = held(name)
    assert first[0] == ("cpu:0", "restoring")
    assert {"cpu:0", "cpu:1"} == {device for device, _ in first}
    assert first[-1][0] == "cpu:1"
    text = [each["text"] for each in recorded()["events"]]
    assert text[0].startswith("Suspended for a test. Resumes when")
    assert text[1:] == [
        "Resumed on Simulated GPU 0.",
        "Moved from Simulated GPU 0 to Simulated GPU 1.",
    ]
    reply = host.call(ActivityRequest(0.0, 0.0))
    assert isinstance(reply, ActivityReply)
    assert [each["id"] for each in reply.activity["devices"]] == ["cpu:0", "cpu:1"]
    assert {each["name"] for each in reply.activity["events"]} == {"mine"}


def test_waiting_sessions_are_counted(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB@1", engine={}, idle_timeout=0)
    one, other = host.client("one"), host.client("other")
    for each in (one, other):
        host.work(each, 150 * MIB)
    with one.cell():
        one.add(1)
        assert one.read() == one.state
        other.add(1)
    assert other.read() == other.state

    def counts() -> set[float]:
        (device,) = recorded()["devices"]
        return {count for _, count in device["queue"]}

    wait_until(lambda: 1 in counts())
    assert "queued" in changes(other.session)


def test_the_record_continues_after_the_agent_was_killed(toy_host: StartHost) -> None:
    host = toy_host(**SETTINGS)
    client, resting = host.client("mine"), host.client("resting")
    host.work(client, MIB)
    host.work(resting, MIB)
    host.call(Suspend(resting.session))
    wait_until(lambda: "idle" in changes(client.session) and kinds(resting.session))
    host.kill_agent()
    client.add(1)
    assert client.read() == client.state
    host.rested(client)
    wait_until(lambda: changes(client.session)[-1] == "idle")
    after = changes(client.session)
    assert after.index("away") < len(after) - 1
    assert kinds(client.session) == []
    assert kinds(resting.session) == ["suspended"]  # which is not recorded again by the next agent
    host.call(Resume(resting.session))
    wait_until(lambda: kinds(resting.session) == ["suspended", "resumed"])


def test_a_worker_that_died_is_lost(toy_host: StartHost) -> None:
    host = toy_host(**SETTINGS)
    client = host.client()
    host.work(client, MIB)
    assert host.kill_worker(client)
    client.add(1)
    assert client.read() == client.state
    host.rested(client)
    wait_until(lambda: kinds(client.session) == ["lost"])
