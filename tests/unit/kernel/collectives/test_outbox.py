"""Memory that ranks of a host share: read in place, used again, and never written by a receiver."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernelproxy.kernel.collectives import exchange
from kernelproxy.kernel.collectives.group import Group
from kernelproxy.kernel.collectives.transport import outbox
from kernelproxy.kernel.collectives.transport.frames import FrameKind, Header
from kernelproxy.kernel.collectives.transport.outbox import (
    ACKNOWLEDGEMENTS,
    SHARED_BYTES_MIN,
    Outbox,
    OutboxPlace,
    SharedMemory,
)
from kernelproxy.kernel.collectives.tree import Reduction
from tests.doubles.rank_threads import RankThreads, call

COUNT = SHARED_BYTES_MIN  # of numbers: four times the bytes from which memory is shared
SUM = Reduction("SUM")


class PeerDouble:
    """A peer's process."""

    lost = False


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """An outbox with room for two contributions, and a receiver's view of it."""
    own = Outbox(2 * 4 * (COUNT + 1024))
    made = [own, SharedMemory(os.dup(own.fd))]
    yield made
    own.close()
    made.clear()  # a mapping keeps a descriptor of its file


def filled(own: Outbox, value: float) -> torch.Tensor:
    return own.empty(COUNT, torch.float32).fill_(value)


def test_a_receiver_reads_what_was_given_in_place(pair: list[Any]) -> None:
    own, view = pair
    content = filled(own, 3.0)
    place = own.give(content[64:], PeerDouble())
    assert place is not None
    found = view.take(place, content[64:].nbytes).view(torch.float32)
    assert torch.equal(found, content[64:])
    content[64] = 7.0
    assert found[0] == 7.0
    assert own.give(torch.zeros(COUNT), PeerDouble()) is None


def test_memory_is_used_again_once_all_have_read_it(pair: list[Any]) -> None:
    own, view = pair
    content = filled(own, 1.0)
    first, size = content.data_ptr(), content.nbytes
    places = [own.give(content, PeerDouble()) for _ in range(2)]
    taken = [view.take(place, size) for place in places if place]
    del content
    assert filled(own, 2.0).data_ptr() != first
    part = taken[0][100:]
    taken.clear()
    assert filled(own, 2.0).data_ptr() != first  # a part of one is still in use
    assert part.view(torch.uint8).sum() > 0
    del part
    assert filled(own, 2.0).data_ptr() == first


def test_a_forked_child_acknowledges_nothing(pair: list[Any]) -> None:
    own, view = pair
    content = filled(own, 1.0)
    first = content.data_ptr()
    place = own.give(content, PeerDouble())
    assert place is not None
    taken = [view.take(place, content.nbytes)]
    del content
    with own._lock:  # as another thread may have it
        child = os.fork()
        if child == 0:
            taken.clear()
            own.abandon()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert filled(own, 2.0).data_ptr() != first
    assert taken[0].view(torch.float32)[0] == 1.0
    taken.clear()
    assert filled(own, 2.0).data_ptr() == first


def test_a_peer_that_has_ended_reads_no_more(pair: list[Any]) -> None:
    own, _ = pair
    content, peer = filled(own, 1.0), PeerDouble()
    first = content.data_ptr()
    assert own.give(content, peer)
    del content
    assert filled(own, 2.0).data_ptr() != first
    peer.lost = True
    assert filled(own, 2.0).data_ptr() == first


def test_contributions_that_do_not_fit_are_ordinary_memory(pair: list[Any]) -> None:
    own, peer = pair[0], PeerDouble()
    held = [filled(own, float(i)) for i in range(3)]
    assert [own.give(each, peer) is not None for each in held] == [True, True, False]
    del held
    peer.lost = True
    large = own.empty(2 * COUNT, torch.float32)  # both regions, as one
    assert own.give(large, peer) is not None


@pytest.mark.parametrize("offset", [0, ACKNOWLEDGEMENTS - 1, 1 << 60])
def test_places_outside_are_refused(pair: list[Any], offset: int) -> None:
    for place in (OutboxPlace(offset, 1), OutboxPlace(ACKNOWLEDGEMENTS, ACKNOWLEDGEMENTS)):
        with pytest.raises(ValueError, match="does not have"):
            pair[1].take(place, 8)


def test_files_that_are_no_outbox_are_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 2 * ACKNOWLEDGEMENTS)
    with pytest.raises((OSError, ValueError)):
        SharedMemory(fd)  # it could shrink


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_collectives_of_shared_memory_change_only_what_is_their_own(size: int) -> None:
    ranks = RankThreads(size)
    values = [
        torch.randn(size * COUNT, generator=torch.Generator().manual_seed(r)) for r in range(size)
    ]
    expected = SUM.combine([each.clone() for each in values], 0)
    small = values[0][: exchange.SMALL_BYTES // 4]
    assert small.nbytes < SHARED_BYTES_MIN  # it is reduced in place while others read it

    def program(group: Group) -> None:
        def given() -> torch.Tensor:
            return group.empty(size * COUNT, torch.float32).copy_(values[group.rank])

        summed, own = given(), given()
        assert own.data_ptr() != summed.data_ptr()
        found = call(group, "a", lambda each: torch.cat(exchange.all_reduce(each, summed, SUM)))
        assert torch.equal(found, expected)
        gathered = call(group, "b", lambda each: exchange.all_gather(each, own, [own] * size))
        assert all(map(torch.equal, gathered, values))
        parts = list(given().chunk(size))
        mine = call(group, "c", lambda each: exchange.reduce_scatter(each, parts, parts[0], SUM))
        assert torch.equal(mine, expected.chunk(size)[group.rank])
        call(group, "d", exchange.barrier)
        assert all(map(torch.equal, gathered, values))
        assert torch.equal(own, values[group.rank])

    try:
        ranks.all(program)
        # Many more than the outbox has room for at a time.
        many = outbox.OUTBOX_BYTES // values[0].nbytes * 3

        def again(group: Group) -> None:
            for number in range(min(many, 200)):
                data = group.empty(size * COUNT, torch.float32).copy_(values[group.rank])
                pieces = call(group, f"{number}", lambda each: exchange.all_reduce(each, data, SUM))  # noqa: B023
                assert torch.equal(torch.cat(pieces), expected)

        ranks.all(again)
        used = [each.outbox._used for each in ranks.endpoints]
        assert all(count <= ACKNOWLEDGEMENTS + 8 * 4 * (size * COUNT + 1024) for count in used), (
            used
        )
    finally:
        ranks.close()


def test_a_rank_of_another_host_gets_the_bytes() -> None:
    ranks = RankThreads(2, local=False)

    def program(group: Group) -> None:
        data = group.empty(COUNT, torch.float32).fill_(group.rank)
        group.send(1 - group.rank, Header(FrameKind.message, number=1, text="x"), data)
        frame = group.receive(1 - group.rank, FrameKind.message, 1)
        assert frame.header.place is None
        assert torch.equal(
            frame.content.view(torch.float32), torch.full((COUNT,), 1.0 - group.rank)
        )

    try:
        ranks.all(program)
    finally:
        ranks.close()


def test_processes_that_may_not_have_such_files_use_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        ranks = RankThreads(3)

    def program(group: Group) -> torch.Tensor:
        data = group.empty(3 * COUNT, torch.float32).fill_(group.rank + 1)
        return call(group, "a", lambda each: torch.cat(exchange.all_reduce(each, data, SUM)))

    try:
        assert all(torch.equal(each, torch.full((3 * COUNT,), 6.0)) for each in ranks.all(program))
    finally:
        ranks.close()


def test_ranks_share_no_memory_where_that_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SING_OUTBOX", "0")
    ranks = RankThreads(2)

    def program(group: Group) -> torch.Tensor:
        data = group.empty(COUNT, torch.float32).fill_(group.rank + 1)
        return call(group, "a", lambda each: torch.cat(exchange.all_reduce(each, data, SUM)))

    try:
        assert [each.outbox.fd for each in ranks.endpoints] == [-1, -1]
        assert all(torch.equal(each, torch.full((COUNT,), 3.0)) for each in ranks.all(program))
    finally:
        ranks.close()
