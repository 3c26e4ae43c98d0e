"""Requests to a daemon that dies: retried once, with the daemon that replaces it."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.fd_wait import readable
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Done, Message, OpenSession, StatusRequest


class Mortal:
    """Listens, and dies this many times before it answers a request."""

    def __init__(self, path: Path, deaths: int) -> None:
        self.requests: list[Message] = []
        self._deaths = deaths
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            with sock:
                self.requests.append(recv_message(sock)[0])
                if len(self.requests) > self._deaths:
                    send_message(sock, Done("at last"))


@pytest.fixture(params=[0, 1, 2])
def mortal(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[Mortal]:
    one = Mortal(runtime_dir / "agent.sock", request.param)
    yield one
    one.close()


def test_a_request_is_made_again_once(mortal: Mortal) -> None:
    request = OpenSession("n", "k", "python")
    with agent_client.connect(start=False) as connection:
        if mortal._deaths < 2:
            assert connection.call(request, 60) == Done("at last")
        else:
            with pytest.raises(ControlError, match="broke") as error:
                connection.call(request, 60)
            assert error.value.reason == "no-daemon"
    # The same one, with its key: a retry does not open a second session.
    assert mortal.requests == [request] * min(mortal._deaths + 1, 2)


def test_two_requests_to_open_are_two() -> None:
    assert OpenSession("n", "k", "python") != OpenSession("n", "k", "python")


def test_a_dead_socket_reports_the_first_error(runtime_dir: Path) -> None:
    path = runtime_dir / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        connection = agent_client.connect(start=False)
    with pytest.raises(ControlError, match=r"connection .* broke") as error:
        connection.call(StatusRequest(), 60)
    assert error.value.reason == "no-daemon"


def test_any_descriptor_is_waited_for() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        pytest.skip("this process may not have as many descriptors as select() knows")
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 2000)  # beyond what select() knows
    try:
        assert not readable(high, 0)
        os.write(writer, b"x")
        assert readable(high, 60.0)
    finally:
        for fd in (reader, writer, high):
            os.close(fd)
