"""Bounds on one user's use of the system daemon's loop, connections and descriptors."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kernelproxy.agent.api import peer_limits
from kernelproxy.agent.api.peer_limits import PeerLimits, check_request
from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc import agent_client, fair_share, fd_validation
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.ipc.fair_share import Share
from kernelproxy.common.ipc.fd_validation import Guard
from kernelproxy.common.ipc.framing import encode, recv_message, send_message
from kernelproxy.common.protocol import Carried, Done, OpenSession, StatusRequest, Suspend

MALICE, BOB = 77, 78


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_that_used_up_its_burst_waits_for_tokens() -> None:
    clock = Clock()
    share = Share(clock)
    share.spend(fair_share.BURST_SECONDS / 2)
    assert share.pause() == 0
    share.spend(fair_share.BURST_SECONDS)
    assert share.pause() == pytest.approx(fair_share.BURST_SECONDS / 2 / fair_share.RATE, abs=2e-3)
    clock.now += share.pause()
    assert share.pause() == 0
    share.spend(1000.0)
    assert share.pause() == fair_share.PAUSE_SECONDS_MAX


def test_charged_work_ends_fails_and_is_cancelled_as_any_other() -> None:
    async def work(what: str) -> None:
        await asyncio.sleep(0)
        if what == "fail":
            raise ValueError("it failed")
        with suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        if what == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("ended")

    async def main() -> None:
        share = Share()
        await share.charge(work("end"))
        with pytest.raises(ValueError, match="it failed"):
            await share.charge(work("fail"))
        hanging = asyncio.create_task(share.charge(work("hang")))
        await asyncio.sleep(0.02)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging

    seen: list[str] = []
    asyncio.run(main())
    assert seen == ["ended"]


def nested(count: int) -> bytes:
    """A message with so many lists in a list."""
    head = b'{"kind":"Carried","session":"s","verb":"v","name":"n","outcome":{"a":['
    body = head + b"[]," * count + b"[]]}}"
    return struct.pack("<I", len(body)) + body


#: Messages that a hostile user sends endlessly.
FLOODS = {
    "requests": encode(StatusRequest()) * 1000,
    "nested lists": nested(20_000),
    "many values": nested(40_000),
    "too many values": nested(110_000),
    "long texts": encode(Carried("s", "v", "n", "", {"a": "\N{BLACK STAR}" * 100_000})),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_hundred_hostile_connections_do_not_block_the_loop(flood: str) -> None:
    """In seconds of the loop's own thread.

    Other processes on the processor can only add to these, so the minimum of a few attempts is what
    the loop itself takes.
    """
    for _ in range(4):
        worst, served = asyncio.run(_flooded(FLOODS[flood]))
        if worst < 0.05:
            break
    assert worst < 0.05
    assert served >= 1


async def _flooded(flood: bytes) -> tuple[float, int]:
    """Return the longest processor time until another user was answered, and a message count.

    It counts the hostile messages that were answered or refused.
    """
    loop, share, served = asyncio.get_running_loop(), Share(), 0

    async def serve(channel: Channel) -> None:
        nonlocal served
        try:
            while True:
                await channel.receive()
                served += 1
                await channel.send(Done())
        except (OSError, ProtocolError):
            served += 1
        finally:
            channel.close()

    def pour(sockets: list[socket.socket]) -> None:
        left = {each: memoryview(flood) for each in sockets}
        while not over.is_set():
            for each in list(left):
                with suppress(BlockingIOError, ConnectionError):
                    left[each] = left[each][each.send(left[each]) :] or memoryview(flood)
                with suppress(BlockingIOError, ConnectionError):
                    each.recv(1 << 16)
            over.wait(0.002)

    over, worst, rounds = threading.Event(), 0.0, 0
    with ExitStack() as stack:
        tasks, theirs, channels = [], [], []
        for number in range(101):
            here, there = socket.socketpair()
            stack.enter_context(there).setblocking(False)
            user = BOB if number == 100 else MALICE
            channel = Channel(here, Guard(user, share=Share() if user == BOB else share))
            tasks.append(asyncio.create_task(channel.charged(serve(channel))))
            theirs.append(there)
            channels.append(channel)
        bob = Channel(theirs.pop())
        pouring = threading.Thread(target=pour, args=(theirs,))
        pouring.start()
        end = loop.time() + 0.7
        while loop.time() < end or rounds < 10 or served <= rounds:
            assert loop.time() < end + 60
            await asyncio.sleep(0.01)
            began = time.thread_time()
            await bob.send(StatusRequest())
            await bob.receive()
            worst, rounds = max(worst, time.thread_time() - began), rounds + 1
        over.set()
        pouring.join()
        bob.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            channel.close()
    return worst, served - rounds


@pytest.fixture
def admitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_limits, "peer_of", lambda sock: MALICE)


def test_a_peer_that_connects_in_a_loop_is_disconnected_and_logged_once(
    admitting: None, caplog: pytest.LogCaptureFixture
) -> None:
    clock, taken = Clock(), 0
    door = PeerLimits(descriptors=65536, clock=clock)

    async def connect(times: int) -> int:
        found = 0
        for _ in range(times):
            here, there = socket.socketpair()
            with there:
                if (channel := door.admit(here)) is not None:
                    channel.close()
                    found += 1
                else:
                    assert there.recv(1) == b""
        return found

    with caplog.at_level(logging.WARNING):
        taken = asyncio.run(connect(3000))
        assert taken == peer_limits.CONNECTS_AT_ONCE
        clock.now += 1
        assert asyncio.run(connect(100)) == peer_limits.CONNECTS_PER_SECOND
        (line,) = caplog.messages
        assert f"User {MALICE}: 1 connections were closed at once: they make more than 50" in line
        clock.now += 3600
        assert asyncio.run(connect(1)) == 1
    door._users[MALICE]._refill(clock.now + 3600)
    assert door._users[MALICE].is_idle(clock.now + 3600)


def test_connections_are_bounded_by_what_descriptors_there_are(admitting: None) -> None:
    async def hold() -> int:
        door, held = PeerLimits(descriptors=1024), []
        with ExitStack() as stack:
            for _ in range(100):
                here, there = socket.socketpair()
                stack.enter_context(there)
                if (channel := door.admit(here)) is not None:
                    held.append(channel)
            for each in held:
                each.close()
        return len(held)

    assert asyncio.run(hold()) == 64


def test_descriptors_of_unfinished_messages_are_bounded() -> None:
    guard, others = Guard(MALICE), Guard(MALICE)
    guard.hold(10, 16)
    others.hold(10, 16)
    third, another = Guard(MALICE), Guard(BOB)
    another.hold(1, 16)
    with pytest.raises(ProtocolError, match="Too many descriptors"):
        third.hold(10, 1)
    for each in (guard, others, third, another):
        each.hold(0, 0)
    assert not Guard._held_fds

    async def stuff() -> None:
        here, there = socket.socketpair()
        channel = Channel(here, Guard(MALICE))
        with there, open(os.memfd_create("memory"), "rb") as file:
            for _ in range(3):
                socket.send_fds(there, [b"\0"], [file.fileno()] * 2)
            with pytest.raises(ProtocolError, match="Descriptors came"):
                await channel.receive()
            channel.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(stuff())
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_last_descriptors_are_for_the_sessions_that_there_are(
    monkeypatch: pytest.MonkeyPatch, admitting: None
) -> None:
    request = OpenSession("n", "k", "/python")
    check_request(request, 0)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (4, 4))
    assert fd_validation.few_are_left()
    with pytest.raises(ControlError, match="few file descriptors left"):
        check_request(request, 0)
    ours, theirs = socket.socketpair()
    with theirs:
        assert PeerLimits(descriptors=65536).admit(ours) is None
    memory = os.memfd_create("memory")
    with pytest.raises(ProtocolError, match="few descriptors left"):
        Guard(MALICE).check([memory])


def test_a_full_backlog_admits_a_patient_client(tmp_path: Path) -> None:
    path, over = tmp_path / "agent.sock", threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(4)

    def crowd() -> None:
        while not over.is_set():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with sock, suppress(BlockingIOError):
                sock.connect(str(path))

    def serve() -> None:
        while not over.is_set():
            with suppress(BlockingIOError):
                listener.accept()[0].close()
            over.wait(0.0005)

    listener.setblocking(False)
    threads = [threading.Thread(target=each) for each in (crowd, serve)]
    for each in threads:
        each.start()
    try:
        for _ in range(5):
            sock = agent_client.connect_to_watch(path)
            assert sock is not None
            sock.close()
    finally:
        over.set()
        for each in threads:
            each.join()
        listener.close()


def test_an_oversized_message_is_not_sent_and_the_connection_stays() -> None:
    ours, theirs = socket.socketpair()
    with theirs, agent_client.Control(ours) as daemon:
        with pytest.raises(ControlError, match="too large to be sent") as error:
            daemon.call(Suspend("s", "x" * (1 << 20)))
        assert error.value.reason == "bad-request"
        send_message(theirs, Done("it lives"))
        assert daemon.call(StatusRequest()) == Done("it lives")
        assert recv_message(theirs) == (StatusRequest(), [])
