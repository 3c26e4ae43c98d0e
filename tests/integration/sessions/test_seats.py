"""Ranks of a job that share a process under a real daemon, with toy workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproxy.common.protocol import CloseSession, JoinJob, MigrateRequest, Resume, Suspend
from tests.doubles.session.client import ToyClient
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost, lives

MIB = 1 << 20
TWO = "cpu:256MiB@1,cpu:256MiB@1"
StartHost = Callable[..., ToyHost]


def join(host: ToyHost, client: ToyClient, rank: int, job: str = "job", size: int = 2) -> None:
    host.call(JoinJob(client.session, job, rank, size))


def ranks(host: ToyHost, count: int = 2, device: str = "cpu:0") -> list[ToyClient]:
    """Return clients that are ranks of a job, and have executed something."""
    found = [host.client(f"rank {rank}", device=device) for rank in range(count)]
    for rank, client in enumerate(found):
        join(host, client, rank, size=count)
    for client in found:
        host.work(client, MIB)
    return found


def pid(host: ToyHost, client: ToyClient) -> int:
    """Return the pid of its worker, which it has."""
    return wait_until(lambda: host.session(client)["worker_pid"]) or 0


def pids(host: ToyHost, clients: list[ToyClient]) -> list[int]:
    return [pid(host, client) for client in clients]


def work(clients: list[ToyClient]) -> None:
    """Check that they have their states, and work."""
    for number, client in enumerate(clients):
        assert client.read() == client.state
        client.add(number + 2)
        assert client.read() == client.state


def test_ranks_on_one_device_share_a_worker_process(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    clients = ranks(host, 3)
    assert len(set(pids(host, clients))) == 1
    other = host.client("alone", device="cpu:0")
    host.work(other)
    assert pid(host, other) != pid(host, clients[0])
    work([*clients, other])


@pytest.mark.parametrize("why", ["off", "one rank", "other device", "other job"])
def test_ranks_have_processes_of_their_own(toy_host: StartHost, why: str) -> None:
    host = toy_host(TWO, seats=why != "off")
    clients = [host.client(device="cpu:0")]
    clients.append(host.client(device="cpu:1" if why == "other device" else "cpu:0"))
    for rank, client in enumerate(clients):
        name = f"job{rank}" if why in ("other job", "one rank") else "job"
        size = 1 if why == "one rank" else 2
        join(host, client, rank % size, name, size)
        host.work(client)
    assert len(set(pids(host, clients))) == 2
    work(clients)


def test_a_session_that_joins_later_shares_a_process_after_it_was_suspended(
    toy_host: StartHost,
) -> None:
    host = toy_host(TWO)
    clients = [host.client(device="cpu:0") for _ in range(2)]
    for rank, client in enumerate(clients):
        host.work(client)
        join(host, client, rank)
    assert len(set(pids(host, clients))) == 2
    for client in clients:
        host.call(Suspend(client.session))
        host.call(Resume(client.session))
    assert len(set(pids(host, clients))) == 1
    work(clients)


def test_ranks_that_have_joined_late_share_a_process_after_a_turn(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB@1", quantum=0.2)
    clients = [host.client() for _ in range(3)]
    for rank, client in enumerate(clients):
        host.work(client)
        assert len({pid(host, each) for each in clients[: rank + 1]}) == rank + 1
    for rank, client in enumerate(clients):
        join(host, client, rank, size=3)

    def together() -> bool:
        work(clients)
        return len(set(pids(host, clients))) == 1

    wait_until(together)
    work(clients)


@pytest.mark.parametrize("way", ["suspended", "closed"])
def test_a_rank_that_ends_leaves_the_others(toy_host: StartHost, way: str) -> None:
    host = toy_host(TWO)
    first, second = ranks(host)
    process = pid(host, second)
    if way == "suspended":
        host.call(Suspend(first.session))
        assert host.session(first)["worker_pid"] is None
    else:
        host.call(CloseSession(first.session))
        wait_until(lambda: len(host.status().sessions) == 1)
    work([second])
    assert pid(host, second) == process
    if way == "suspended":
        work([first])
        assert pid(host, first) == process
        host.call(Suspend(first.session))
    host.call(Suspend(second.session))
    wait_until(lambda: not lives(process))


def test_a_rank_that_migrates_leaves_the_others_and_joins_others_there(
    toy_host: StartHost,
) -> None:
    host = toy_host(TWO)
    clients = ranks(host, 3)
    here = pid(host, clients[0])
    for client in clients[1:]:
        moved = host.call(MigrateRequest(client.session, "cpu:1")).session
        assert moved["device"] == "cpu:1"
    found = pids(host, clients)
    assert found[0] == here
    assert found[1] == found[2] != here
    work(clients)
    host.call(MigrateRequest(clients[0].session, "cpu:1"))
    assert len(set(pids(host, clients))) == 1
    wait_until(lambda: not lives(here))
    work(clients)


def test_killed_processes_count_against_no_rank(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    clients = ranks(host, 3)
    (process,) = set(pids(host, clients))
    os.kill(process, signal.SIGKILL)
    work(clients)
    alone = pids(host, clients)
    assert len({process, *alone}) == 4  # any of them may be to blame
    for client in clients:
        host.call(Suspend(client.session))
        host.call(Resume(client.session))
    assert len(set(pids(host, clients))) == 1  # they have passed it
    work(clients)


def test_a_record_that_kills_the_process_is_skipped_and_the_others_lose_nothing(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(TWO)
    bad, *others = clients = ranks(host, 3)
    for client in others:
        host.hold(client, tmp_path / f"end-{client.session}")
    for client in others:
        (tmp_path / f"end-{client.session}").touch()
    bad.append("die")
    bad.add(3)
    work(clients)
    #: One with the others, and those that it has killed alone, of which the last one is skipped.
    assert bad.worker.epoch == 1 + 3 + 1
    assert [each.worker.epoch for each in others] == [2, 2]


def test_a_rank_that_hangs_is_ended_and_the_others_lose_nothing(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host("cpu:256MiB@1", still_seconds=0.5, quantum=0.3)
    clients = [host.client(f"rank {rank}") for rank in range(2)]
    hung, other = clients
    for rank, client in enumerate(clients):
        join(host, client, rank)
    for client in clients:
        client.add(1)
        assert client.read() == client.state
    hung.append(f"hang-until {tmp_path / 'end'}")
    wait_until((tmp_path / "end.begun").exists)
    (tmp_path / "end").touch()  # only a worker of a later time continues
    other.add(5)
    assert other.read() == other.state
    work(clients)
    assert hung.worker.epoch > 1


def test_the_next_agent_ends_shared_processes_and_the_ranks_share_one_again(
    toy_host: StartHost,
) -> None:
    host = toy_host(TWO)
    clients = ranks(host)
    (process,) = set(pids(host, clients))
    host.kill_agent()
    work(clients)
    assert not lives(process)
    assert len(set(pids(host, clients))) == 1


def test_shared_processes_leave_no_descriptors_in_the_agent(toy_host: StartHost) -> None:
    host = toy_host(TWO)
    clients = ranks(host)
    for client in clients:
        host.call(Suspend(client.session))
    before = host.fds()
    for turn in range(6):
        for client in clients:
            host.call(Resume(client.session))
        work(clients)
        if turn == 1:
            os.kill(pid(host, clients[0]), signal.SIGKILL)
            work(clients)
        for client in clients:
            host.rested(client)
            host.call(Suspend(client.session))
    wait_until(lambda: len(host.fds()) <= len(before))
