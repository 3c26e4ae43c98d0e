"""Collectives between ranks that are threads of this process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from kernelproxy.common.ipc import detach
from kernelproxy.kernel.collectives import exchange
from kernelproxy.kernel.collectives.group import Group
from kernelproxy.kernel.collectives.transport import addresses, endpoint
from kernelproxy.kernel.collectives.transport.frames import FrameKind, Header
from kernelproxy.kernel.collectives.transport.outbox import OUTBOX_VARIABLE
from kernelproxy.kernel.collectives.tree import Reduction
from tests.doubles.rank_threads import RankThreads, call
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until

SUM = Reduction("SUM")
LARGE = exchange.SMALL_BYTES  # elements: four times the size up to which tensors are small


@pytest.fixture(params=[1, 2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankThreads]:
    threads = RankThreads(request.param)
    yield threads
    threads.close()


@pytest.fixture
def three() -> Iterator[RankThreads]:
    threads = RankThreads(3)
    yield threads
    threads.close()


def arrived(at: endpoint.Endpoint) -> list[str]:
    """Return the calls of the frames that wait at an endpoint."""
    with at.changed:
        return [frame.header.text for stream in at._arrived.values() for frame in stream]


def own(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("count", [0, 1, 7, LARGE, LARGE + 1])
def test_all_reduce_is_the_tree_of_the_whole_on_each_rank(ranks: RankThreads, count: int) -> None:
    size = len(ranks.groups)
    expected = SUM.combine([own(rank, count) for rank in range(size)], 0)

    def program(group: Group) -> torch.Tensor:
        data = own(group.rank, count)
        return torch.cat(call(group, "sum", lambda each: exchange.all_reduce(each, data, SUM)))

    for found in ranks.all(program):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [3, LARGE])
def test_reduce_gives_the_root_the_same(ranks: RankThreads, count: int) -> None:
    size = len(ranks.groups)
    root = size - 1
    expected = SUM.combine([own(rank, count) for rank in range(size)], 0)

    def program(group: Group) -> torch.Tensor:
        data = own(group.rank, count)
        return call(group, "sum", lambda each: exchange.reduce(each, data, SUM, root))

    assert torch.equal(ranks.all(program)[root], expected)


def test_parts_go_where_they_belong(ranks: RankThreads) -> None:
    size = len(ranks.groups)

    def program(group: Group) -> None:
        rank = group.rank
        likes = [torch.empty(r + 1) for r in range(size)]
        gathered = call(
            group, "a", lambda each: exchange.all_gather(each, own(rank, rank + 1), likes)
        )
        for other, found in enumerate(gathered):
            assert torch.equal(found, own(other, other + 1))
        sent = [torch.full((2,), 10.0 * rank + other) for other in range(size)]
        taken = call(group, "b", lambda each: exchange.all_to_all(each, sent, sent))
        assert [int(found[0]) for found in taken] == [10 * other + rank for other in range(size)]
        for root in range(size):
            data = own(rank, 4)
            found = call(group, "c", lambda each: exchange.broadcast(each, data, root))  # noqa: B023
            assert torch.equal(found, own(root, 4))
            parts = [own(100 + other, 2) for other in range(size)] if rank == root else []
            part = call(
                group, "d", lambda each: exchange.scatter(each, parts, torch.empty(2), root)  # noqa: B023
            )  # fmt: skip
            assert torch.equal(part, own(100 + rank, 2))
            found_all = call(
                group, "e", lambda each: exchange.gather(each, data, [data] * size, root)  # noqa: B023
            )  # fmt: skip
            assert len(found_all) == (size if rank == root else 0)
            for other, each in enumerate(found_all):
                assert torch.equal(each, own(other, 4))
        call(group, "f", exchange.barrier)

    ranks.all(program)


def test_tcp_serves_ranks_of_other_hosts() -> None:
    ranks = RankThreads(2, local=False)

    def program(group: Group) -> torch.Tensor:
        data = torch.full((LARGE,), float(group.rank + 1))
        return torch.cat(call(group, "sum", lambda each: exchange.all_reduce(each, data, SUM)))

    try:
        assert all((found == 3).all() for found in ranks.all(program))
    finally:
        ranks.close()


def test_different_calls_fail_on_all_ranks(three: RankThreads) -> None:
    def program(group: Group) -> None:
        text = "all_reduce of 3" if group.rank == 1 else "all_reduce of 2"
        call(group, text, lambda each: exchange.all_reduce(each, torch.ones(2), SUM))
        call(group, "barrier", exchange.barrier)

    for text in three.errors(program):
        assert "all_reduce of 3" in text
        assert "all_reduce of 2" in text


def test_a_rank_that_ends_after_a_failure_has_failed(three: RankThreads) -> None:
    def program(group: Group) -> None:
        call(group, "barrier", exchange.barrier)

    three.all(program)
    first, other = three.groups[:2]
    other.fail("a failure")
    three.end(1)
    header = Header(FrameKind.collective, first._identity)
    with pytest.raises(RuntimeError, match="a failure"):
        three.endpoints[0].send(first._peers[1], header, None)


def test_different_roots_fail_on_all_ranks(three: RankThreads) -> None:
    def program(group: Group) -> None:
        root = group.rank
        call(
            group,
            f"broadcast from rank {root}",
            lambda each: exchange.broadcast(each, torch.ones(2), root),
        )
        call(group, "barrier", exchange.barrier)

    assert all("call different collectives" in text for text in three.errors(program))


def test_error_of_one_rank_reaches_those_that_wait(three: RankThreads) -> None:
    def fail(_: object) -> None:
        raise ValueError("no memory")

    def program(group: Group) -> None:
        call(group, "barrier", fail if group.rank == 2 else exchange.barrier)

    first, second, third = three.errors(program)
    assert third == "no memory"
    assert first == second == "process group 'test': rank 2 failed in barrier: no memory"


def test_end_of_a_rank_is_an_error_of_those_that_wait(three: RankThreads) -> None:
    three.all(lambda group: call(group, "barrier", exchange.barrier))

    def program(group: Group) -> None:
        if group.rank == 1:
            three.end(1)
            raise RuntimeError("over")
        call(group, "barrier", exchange.barrier)

    first, _, third = three.errors(program)
    assert first == third == "process group 'test': the process of rank 1 has ended"


def test_frames_of_a_rank_that_has_ended_arrive(three: RankThreads) -> None:
    ended = threading.Event()

    def program(group: Group) -> int:
        if group.rank == 0:
            header = Header(FrameKind.message, number=5, text="numbers")
            group.send(1, header, torch.arange(LARGE))
            three.end(0)
            ended.set()
            return 0
        if group.rank == 1:
            assert ended.wait(60)
            frame = group.receive(0, FrameKind.message, 5)
            return int(frame.content.view(torch.int64).sum())
        return 0

    assert three.all(program)[1] == sum(range(LARGE))


def test_ranks_that_send_to_each_other_do_not_block(
    three: RankThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "EARLY_BYTES_MAX", 1 << 20)
    data = torch.arange(1 << 20)  # eight times what is received early

    def program(group: Group) -> None:
        others = [rank for rank in range(3) if rank != group.rank]
        for tag in (1, 2):
            for other in others:
                group.send(other, Header(FrameKind.message, number=tag, text="x"), data)
        for tag in (2, 1):
            for other in others:
                frame = group.receive(other, FrameKind.message, tag)
                assert torch.equal(frame.content.view(torch.int64), data)

    three.all(program)


def test_sender_waits_for_a_rank_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "EARLY_BYTES_MAX", 1 << 20)
    monkeypatch.setenv(OUTBOX_VARIABLE, "0")  # shared memory has room for all of it
    two = RankThreads(2)
    data = torch.zeros(1 << 20)  # 4 MiB
    sent: list[int] = []

    def program(group: Group) -> None:
        if group.rank == 0:
            for number in range(8):
                group.send(1, Header(FrameKind.message, number=1, text="x"), data)
                sent.append(number)
            return
        wait_until(lambda: two.endpoints[1]._paused)
        assert len(sent) < 8
        for _ in range(8):
            group.receive(0, FrameKind.message, 1)

    try:
        two.all(program)
    finally:
        two.close()


def test_ranks_of_a_restored_copy_connect_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sockets have names that differ from those which they have exchanged."""
    plain = addresses.local_name
    monkeypatch.setattr(endpoint, "local_name", lambda token: f"{plain(token)}.copy")
    two = RankThreads(2)
    try:
        two.all(lambda group: call(group, "barrier", exchange.barrier))
    finally:
        two.close()


def test_a_detached_rank_connects_when_it_is_back() -> None:
    two = RankThreads(2)
    detach.current.begin(WAIT_SECONDS)
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(two.all, lambda group: call(group, "barrier", exchange.barrier))
            wait_until(lambda: any(each._connecting.locked() for each in two.endpoints))
            assert not any(each._peers for each in two.endpoints)
            detach.current.end(detach.Return())
            done.result(WAIT_SECONDS)
    finally:
        two.close()


def test_strangers_are_not_heard() -> None:
    two = RankThreads(2)
    place = json.loads(two.endpoints[0].address)
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0jupyter-sing-rank-{place['token']}")
            stranger.send(Header(FrameKind.hello, text="0" * 64).encode())
            assert stranger.recv(1) == b""  # the connection has been closed
        two.all(lambda group: call(group, "barrier", exchange.barrier))
    finally:
        two.close()


def test_group_that_is_made_again_takes_nothing_from_its_predecessor() -> None:
    """Also if one rank calls the new group before the other one has destroyed the old one."""
    two = RankThreads(2)

    def again(rank: int) -> Group:
        return Group("test", rank, 2, two.store, two.endpoints[rank])

    def fails(group: Group) -> None:
        call(group, f"of {group.rank}", exchange.barrier)

    try:
        assert "call different collectives" in two.errors(fails)[0]
        first, old = again(0), two.groups[1]
        with ThreadPoolExecutor(1) as other:
            ended = other.submit(call, first, "barrier", exchange.barrier)
            second = again(1)
            wait_until(lambda: "meet" in arrived(two.endpoints[1]))
            old.close()
            call(second, "barrier", exchange.barrier)
            ended.result(WAIT_SECONDS)
    finally:
        two.close()


def test_rank_without_a_session_waits_no_more(three: RankThreads) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            wait_until(lambda: three.endpoints[2]._waiting)
            three.endpoints[2].end_session()
            raise RuntimeError("done")
        call(group, "barrier", exchange.barrier)

    ended = "process group 'test': the device session of rank 2 has ended"
    assert three.errors(program)[1:] == [ended, ended]


def test_rank_without_a_session_does_not_wait_for_its_peers_to_appear() -> None:
    own = endpoint.Endpoint()
    try:
        group = Group("test", 0, 2, distributed.HashStore(), own)  # type: ignore[attr-defined]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(call, group, "barrier", exchange.barrier)
            wait_until(lambda: own._waiting)
            own.end_session()
            error = waiting.exception(WAIT_SECONDS)
        assert str(error) == "process group 'test': the device session of rank 0 has ended"
    finally:
        own.close()


def scatter(group: Group) -> torch.Tensor:
    return call(
        group, "scatter", lambda own: exchange.scatter(own, [torch.ones(1)] * 2, torch.empty(1), 0)
    )


def broadcast(group: Group) -> torch.Tensor:
    return call(group, "broadcast", lambda own: exchange.broadcast(own, torch.ones(1), 0))


def test_rank_that_receives_nothing_waits_at_first_until_all_have_met() -> None:
    """Else it could end, and the store with it, before the others have found each other."""
    two = RankThreads(2)
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(scatter, two.groups[0])
            wait_until(lambda: two.endpoints[0]._waiting or first.done())
            assert not first.done()
            assert scatter(two.groups[1]).item() == 1
            first.result(WAIT_SECONDS)
            assert scatter(two.groups[0]).item() == 1  # later, it does not wait
    finally:
        two.close()


def test_root_of_a_broadcast_waits_until_all_have_called() -> None:
    two = RankThreads(2)
    try:
        two.all(lambda group: call(group, "barrier", exchange.barrier))
        with ThreadPoolExecutor(1) as pool:
            root = pool.submit(broadcast, two.groups[0])
            wait_until(lambda: two.endpoints[0]._waiting or root.done())
            assert not root.done()
            assert broadcast(two.groups[1]).item() == 1
            assert root.result(WAIT_SECONDS).item() == 1
    finally:
        two.close()
