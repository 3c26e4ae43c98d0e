"""A worker with several sessions, over a double of its library: what ends one, and what all."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import End, Host, Open, Opened
from kernelproxy.worker.seat import SeatServer
from tests.doubles.waiting import wait_until

ORDER = Open("a" * 12, "cpu", 1, 1, [], snapshot=False, gate=True, seat="secret")


class LibraryDouble:
    """A library whose sessions run until their end is ordered."""

    def __init__(self) -> None:
        self.open: dict[int, threading.Event] = {}
        self.ended = threading.Event()
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("sing_worker_")
        return lambda *_: 0

    def sing_worker_open(self, *_: Any) -> int:
        number = next(self._numbers)
        self.open[number] = threading.Event()
        return number

    def sing_worker_run(self, number: int) -> int:
        self.open[number].wait()
        return 0

    def sing_worker_end(self, number: int) -> None:
        if (session := self.open.get(number)) is not None:  # else it is closed
            session.set()

    def sing_worker_close(self, number: int) -> None:
        del self.open[number]

    def sing_worker_serve(self, threads: int) -> int:
        self.ended.wait()
        return 0

    def sing_worker_end_seat(self) -> None:
        self.ended.set()


class AgentSide:
    """The agent's side: connections to the sessions of one seat."""

    def __init__(self) -> None:
        self.library = LibraryDouble()
        self.connections: list[socket.socket] = []
        ours, theirs = self.connection()
        self.server = SeatServer(self.library, 1, "secret")  # type: ignore[arg-type]
        first = self.first_order(ours, theirs)
        self.thread = threading.Thread(target=self.server.serve, args=(theirs, *first))
        self.thread.start()
        assert isinstance(recv_message(ours)[0], Opened)

    def connection(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        self.connections.append(ours)
        return ours, theirs

    def order(self, connection: socket.socket) -> None:
        files = [os.memfd_create("part") for _ in range(5)]
        send_message(connection, ORDER, files)
        for fd in files:
            os.close(fd)

    def first_order(self, ours: socket.socket, theirs: socket.socket) -> tuple[Open, list[int]]:
        self.order(ours)
        order, fds = recv_message(theirs)
        assert isinstance(order, Open)
        return order, fds

    def join(self) -> socket.socket:
        """Let one more session join, without its first order."""
        ours, theirs = self.connection()
        with theirs:
            send_message(self.connections[0], Host(), [theirs.fileno()])
        return ours

    def joined(self) -> socket.socket:
        connection = self.join()
        self.order(connection)
        assert isinstance(recv_message(connection)[0], Opened)
        return connection


@pytest.fixture
def agent() -> Iterator[AgentSide]:
    made = AgentSide()
    try:
        yield made
    finally:
        for each in made.connections:
            each.close()
        made.thread.join()
        assert made.server.last is not None
        made.server.last.close()


def has_ended(connection: socket.socket) -> bool:
    """Wait for the end of a connection."""
    return connection.recv(1) == b""


def test_a_session_that_ends_is_freed_before_its_connection_ends(agent: AgentSide) -> None:
    connection = agent.joined()
    send_message(connection, End())
    assert has_ended(connection)
    assert list(agent.library.open) == [0]
    assert not agent.library.ended.is_set()


def test_the_last_session_ends_the_seat_and_its_connection_ends_with_the_process(
    agent: AgentSide,
) -> None:
    send_message(agent.connections[0], End())
    agent.thread.join()
    assert agent.library.open == {}
    with pytest.raises(BlockingIOError):
        agent.connections[0].recv(1, socket.MSG_DONTWAIT)


def test_a_connection_that_breaks_ends_only_its_session(agent: AgentSide) -> None:
    agent.joined().shutdown(socket.SHUT_WR)
    wait_until(lambda: list(agent.library.open) == [0])
    assert not agent.library.ended.is_set()


def test_a_session_is_freed_if_its_agent_has_gone_before_it_was_opened(agent: AgentSide) -> None:
    connection = agent.join()
    opens = threading.Event()
    opened = agent.library.sing_worker_open

    def open_late(*given: Any) -> int:
        connection.close()
        opens.set()
        return opened(*given)

    agent.library.sing_worker_open = open_late  # type: ignore[method-assign]
    agent.order(connection)
    opens.wait()
    wait_until(lambda: list(agent.library.open) == [0])
    assert agent.joined().fileno() >= 0


def test_a_session_that_is_given_up_before_it_is_opened_leaves_the_others(
    agent: AgentSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    connection = agent.join()
    send_message(connection, End())
    assert has_ended(connection)
    assert ends == []
    assert list(agent.library.open) == [0]
    assert not agent.library.ended.is_set()


def test_a_connection_without_a_first_order_counts_as_a_session(agent: AgentSide) -> None:
    connection = agent.join()
    send_message(agent.connections[0], End())
    wait_until(lambda: not agent.library.open)
    assert not agent.library.ended.is_set()
    connection.close()
    agent.thread.join()
