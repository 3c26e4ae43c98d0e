"""Device memory under a real daemon: granted, reclaimed and queued for, with toy workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial

from kernelproxy.common.protocol import CloseSession, Resume, Suspend
from tests.doubles.session.client import ToyClient
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

MIB = 1 << 20
StartHost = Callable[..., ToyHost]


class MemoryRequester:
    """Client that requests memory while the test does something else."""

    def __init__(self, client: ToyClient, wanted: int) -> None:
        self.answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(client.want(wanted)))

    def __enter__(self) -> MemoryRequester:
        self._thread.start()
        return self

    def answer(self) -> bool:
        self._thread.join()
        return self.answers == [True]

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_memory_is_granted_in_steps_and_denied_beyond_the_device(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    client = host.client()
    assert client.want(1)
    assert client.agent.memory_granted == 64 * MIB
    assert client.want(200 * MIB)
    assert client.agent.memory_granted == 256 * MIB
    assert not client.want(256 * MIB + 1)
    assert client.agent.memory_granted == 256 * MIB


def test_an_impossible_request_starts_no_worker(toy_host: StartHost) -> None:
    host = toy_host("cpu:64MiB")
    client = host.client()
    assert not client.want(65 * MIB)
    assert host.session(client)["worker_pid"] is None


def test_unused_grants_of_idle_neighbours_are_taken_back(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second = host.client("first"), host.client("second")
    assert first.want(192 * MIB)
    host.work(first, 10 * MIB)
    assert second.want(150 * MIB)
    assert 10 * MIB <= first.agent.memory_granted <= 106 * MIB
    assert host.session(first)["worker_pid"]


def test_an_idle_neighbour_is_suspended_to_make_room(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second = host.client("first"), host.client("second")
    for client in (first, second, first):
        host.work(client, 150 * MIB)
        other = second if client is first else first
        state = host.session(other)
        assert state["state"] == ("idle" if state["log_head"] == 0 else "suspended")
    assert "Made room for first. " in host.session(second)["reason"]


def test_a_running_session_waits_for_what_busy_neighbours_have(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second = host.client("first"), host.client("second")
    host.work(first, 100 * MIB)
    host.work(second, 100 * MIB)
    with first.cell(), second.cell(), MemoryRequester(second, 180 * MIB) as asking:
        wait_until(lambda: host.when(second, "queued"))
        # It left, so that sessions which have memory and want more do not wait for each other.
        assert first.want(180 * MIB)
        assert host.session(second)["state"] == "queued"
        assert not asking.answers
        assert not first.want(257 * MIB)  # more than it could have alone is refused at once
        first.page.memory_used = 0
        first.page.cells_running -= 1
        first.send_bell()
        assert asking.answer()
        first.page.cells_running += 1
    assert second.read() == second.state
    assert first.read() == first.state


def test_a_cancelled_wait_for_memory_needs_no_more_than_it_has(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second = host.client("first"), host.client("second")
    host.work(first, 150 * MIB)
    host.work(second, 64 * MIB)
    with first.cell(), second.cell():
        second.page.memory_wanted = 150 * MIB
        second.page.want_sequence += 1
        second.send_bell()
        wait_until(lambda: host.when(second, "queued"))
        second.page.memory_wanted = 64 * MIB  # as a client does after an interrupt
        second.send_bell()
        second.add(2)
        assert second.read() == second.state


def test_memory_that_was_granted_and_revoked_is_requested_again(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    client = host.client()
    host.work(client, 10 * MIB)
    assert client.want(150 * MIB)
    host.call(Suspend(client.session))  # before the memory was used
    assert client.agent.memory_granted < 150 * MIB
    assert client.agent.refused_sequence == 0
    assert client.want(150 * MIB)
    assert not client.want(257 * MIB)
    assert client.agent.refused_sequence == client.page.want_sequence


def test_a_request_during_a_neighbours_reconciliation_is_not_denied(
    toy_host: StartHost,
) -> None:
    host = toy_host("cpu:256MiB")
    first, second = host.client("first"), host.client("second")
    second.use(64 * MIB)
    with second.cell():
        for _ in range(20):
            first.use(100 * MIB)
            # Its request is granted, or its worker starts, while the other requests what it frees.
            with first.cell():
                assert second.want(150 * MIB)
            second.page.memory_used = 64 * MIB
            first.page.memory_used = 0
            assert second.want(190 * MIB)


def test_a_session_that_finds_no_room_waits_in_line(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second, third = (host.client(name) for name in ("first", "second", "third"))
    for client in (second, third, first):
        host.work(client, 200 * MIB)
    with first.cell():
        first.read()
        second.add(2)
        wait_until(lambda: host.when(second, "queued"))
        third.add(2)
        queued = wait_until(lambda: host.when(third, "queued"))
        assert "Place 2 in the queue" in queued["reason"]
        assert (queued["queue_position"], queued["expected_wait"]) == (2, None)
        assert wait_until(lambda: host.session(second)["queued_for"])
    assert second.read() == second.state
    assert third.read() == third.state


def test_a_queued_session_can_be_suspended_and_closed(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second, third = (host.client(name) for name in ("first", "second", "third"))
    for client in (second, third, first):
        host.work(client, 200 * MIB)
    with first.cell():
        for client in (second, third):
            client.add(2)
            wait_until(partial(host.when, client, "queued"))
        assert host.call(Suspend(second.session)).session["state"] == "suspended"
        host.call(CloseSession(third.session))
        assert {each["name"] for each in host.status().sessions} == {"first", "second"}
    assert host.call(Resume(second.session)).session["worker_pid"]
    assert second.read() == second.state


def test_a_dead_worker_comes_back_while_others_wait(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second = host.client("first"), host.client("second")
    for client in (second, first):
        host.work(client, 200 * MIB)
    with first.cell():
        second.add(2)
        wait_until(lambda: host.when(second, "queued"))
        os.kill(existing(host.session(first)["worker_pid"]), signal.SIGKILL)
        first.add(2)
        assert first.read() == first.state
    assert second.read() == second.state


def test_a_request_during_an_eviction_for_less_memory_gets_its_own_answer(
    toy_host: StartHost,
) -> None:
    host = toy_host("cpu:256MiB", still_seconds=600.0)
    first, second = host.client("first"), host.client("second")
    for client, used in ((first, 100 * MIB), (second, 200 * MIB)):
        host.work(client, used)
    worker = existing(host.rested(second)["worker_pid"])
    wait_until(lambda: host.when(first, "suspended"))
    os.kill(worker, signal.SIGSTOP)  # making room takes a while
    try:
        first.add(2)
        wait_until(lambda: host.bells_were_received(first))
        host.status()  # the agent has looked at its requests by now
        granted: list[bool] = []
        asking = threading.Thread(target=lambda: granted.append(first.want(190 * MIB)))
        asking.start()
        wait_until(lambda: first.page.want_sequence != first.agent.grant_sequence)
    finally:
        os.kill(worker, signal.SIGCONT)
    asking.join()
    assert granted == [True]
    assert first.read() == first.state
