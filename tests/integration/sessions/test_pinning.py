"""Pinned sessions and priorities, under a real daemon with toy workers and the scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jupyter_sing.controller import decision_log
from jupyter_sing.scheduler.settings import Tier
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    CloseSession,
    MigrateRequest,
    Pin,
    Resume,
    SetPriority,
    Suspend,
)
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.scheduler_api import TIERS
from tests.doubles.session.client import ToyClient
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost, kill_at_once

MIB = 1 << 20
StartHost = Callable[..., ToyHost]

SHORT = {"engine": {"quanta": [0.02] * 4, "run_min_switches": 0.0}}


def pin(host: ToyHost, client: ToyClient, pinned: bool = True) -> SessionView:
    found: SessionView = host.call(Pin(client.session, pinned)).session
    assert found["pinned"] is pinned
    return found


def test_a_pinned_session_is_not_suspended_for_idleness(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0.3, **SHORT)
    pinned, other = host.client("pinned"), host.client("other")
    pin(host, pinned)
    host.call(Pin(pinned.session, True))  # idempotent
    for each in (pinned, other):
        each.use(MIB)
        each.add(1)
    wait_until(lambda: host.when(other, "suspended"))
    found = host.session(pinned)
    assert (found["state"], found["tier"]) == ("idle", "resident")
    assert "Pinned" in found["reason"]
    pin(host, pinned, False)
    pin(host, pinned, False)
    wait_until(lambda: host.when(pinned, "suspended"))
    assert pinned.read() == pinned.state


@pytest.mark.parametrize("settings", [SHORT, {}], ids=["engine", "everybody"])
def test_the_memory_of_a_pinned_session_is_not_taken(
    toy_host: StartHost, settings: dict[str, object]
) -> None:
    host = toy_host("cpu:256MiB@1", **settings)
    pinned, other = host.client("pinned"), host.client("other")
    host.work(pinned, 150 * MIB)
    worker = pin(host, pinned)["worker_pid"]
    other.page.memory_used = 150 * MIB  # as one that was suspended with it
    other.add(1)
    found = wait_until(lambda: (s := host.session(other))["state"] == "queued" and s)
    wait_until(lambda: "is pinned" in host.session(other)["reason"])
    found = host.session(other)
    assert (
        found["reason"]
        == "Waiting for 150.0 MiB on Simulated GPU 0: pinned is pinned and keeps 150.0 MiB."
    )
    # It still gets its turns.
    for _ in range(20):
        pinned.add(1)
        assert pinned.read() == pinned.state
    assert host.session(pinned)["worker_pid"] == worker
    pin(host, pinned, False)
    assert other.read() == other.state
    assert pinned.read() == pinned.state


def test_a_kernel_that_is_restarted_is_pinned_still(toy_host: StartHost) -> None:
    host = toy_host(**SHORT)
    first = host.client("first", kernel_id="k-1", key="1")
    pin(host, first)
    host.call(SetPriority(first.session, "basic"))
    host.call(CloseSession(first.session))
    host.kill_agent()
    for key, kernel, pinned, level in (("2", "k-2", False, None), ("3", "k-1", True, "basic")):
        found = host.session(host.client(key, kernel_id=kernel, key=key))
        assert (found["pinned"], found["priority"]) == (pinned, level)


def test_memory_a_pinned_session_does_not_use_is_available(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB@1", **SHORT)
    pinned, other = host.client("pinned"), host.client("other")
    assert pinned.want(192 * MIB)
    host.work(pinned, 100 * MIB)
    pin(host, pinned)
    host.work(other, 150 * MIB)
    assert host.session(pinned)["tier"] == "resident"


def test_its_owner_suspends_and_moves_a_pinned_session(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **SHORT)
    client = host.client(device="cpu:0")
    host.work(client, MIB)
    pin(host, client)
    assert host.call(Suspend(client.session)).session["state"] == "suspended"
    assert host.session(client)["pinned"] is True
    assert host.call(Resume(client.session)).session["tier"] == "resident"
    assert host.call(MigrateRequest(client.session, "cpu:1")).session["device"] == "cpu:1"
    host.work(client, MIB)
    found = host.session(client)
    assert (found["device"], found["pinned"], found["tier"]) == ("cpu:1", True, "resident")


def test_a_pinned_session_comes_back_to_its_device(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **SHORT)
    client = host.client()
    where = host.work(client, MIB)["device"]
    pin(host, client)
    for _ in range(5):
        kill_at_once(existing(host.session(client)["worker_pid"]))
        assert host.work(client, MIB)["device"] == where


def test_requests_outlive_the_agent(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0.3, **SHORT)
    client = host.client()
    host.work(client, MIB)
    pin(host, client)
    assert host.call(SetPriority(client.session, "basic")).session["priority"] == "basic"
    for _ in range(2):
        host.kill_agent()
        client.add(1)
        assert client.read() == client.state
        found = host.rested(client)
        assert (found["pinned"], found["priority"]) == (True, "basic")
    other = host.client("other")
    other.add(1)
    wait_until(lambda: host.when(other, "suspended"))
    assert host.session(client)["tier"] == "resident"


def test_priorities_are_given_as_far_as_they_may_be(toy_host: StartHost) -> None:
    host = toy_host(**SHORT)
    client = host.client("mine")
    assert host.session(client)["priority"] is None
    for level in ("basic", "basic", "standard"):
        assert host.call(SetPriority(client.session, level)).session["priority"] == level
    for level, reason, text in (
        ("premium", "not-allowed", "policy apply"),
        ("best", "bad-request", "only premium, standard, basic"),
    ):
        with pytest.raises(ControlError, match=text) as refused:
            host.call(SetPriority(client.session, level))
        assert refused.value.reason == reason
        assert host.session(client)["priority"] == "standard"
    pin(host, client)

    def said() -> list[str]:
        try:
            return [e.reason for e in decision_log.read(paths.runtime_dir(), "mine", 10)]
        except ControlError:  # nothing is written down yet
            return []

    wait_until(lambda: said() and "stays on Simulated GPU 0" in said()[-1])
    assert any("served as basic" in each for each in said())


def test_levels_are_those_of_the_scheduler() -> None:
    assert [str(each) for each in Tier] == list(TIERS)
