"""Client double without torch: appends toy records to a real session, like the native client."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kernelproxy.common import paths
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.detach import Absence
from kernelproxy.common.ipc.framing import send_message
from kernelproxy.common.protocol import Attach, Bell
from kernelproxy.common.shared_memory import (
    ANSWER_RING_BYTES,
    PAGE_BYTES,
    AgentPage,
    ClientPage,
    Presence,
    WorkerPage,
    close_all,
)
from kernelproxy.kernel.activation.agent_connection import Link
from tests.doubles.daemon.zygote import CALL, HEADER, READ, step
from tests.doubles.session import futex

TORCH = "2.13.0+toy"
#: Timeout of waits. A loaded machine may need a good part of it.
WAIT_SECONDS = 120.0
#: Offset of the client's own words in its page.
HEAD_OFFSET = ClientPage.head.offset


class ToyClient:
    """The kernel's end of a session. Not thread-safe."""

    def __init__(self, session: str, torch_version: str = TORCH) -> None:
        connection = agent_client.connect(start=False)
        attach = Attach(session, torch_version)
        try:
            _, fds = connection.call_with_fds(attach, WAIT_SECONDS)
        except BaseException:
            connection.close()
            raise
        self.session = session
        self.sock = connection.detach()
        self._map(fds)
        close_all(fds)
        self.page.pid = os.getpid()
        self.state = 0  # the expected state of the worker
        self.rung: int | None = None
        self.gone = threading.Event()
        # Its own: other connections of the test's process stay open.
        self.absence = Absence()
        fd, path = self.sock.fileno(), paths.socket_path()
        self.link = Link(fd, attach, path, self.gone.set, self, self.absence)
        self.link.start()

    def _map(self, fds: Sequence[int]) -> None:
        self.log = mmap.mmap(fds[0], 0)
        self.page = ClientPage(fds[1], writable=True)
        self.worker = WorkerPage(fds[2], writable=False, extra_bytes=ANSWER_RING_BYTES)
        self.agent = AgentPage(fds[3], writable=False)

    def leave(self, seconds: float) -> None:
        """Detach; called by the link if the test does not use the device. See `NativeClient`."""
        self.left = bytes(self.page.memory[HEAD_OFFSET:])
        self._unmap()
        self.sock.detach()

    def rejoin(self, fds: Sequence[int], bell_fd: int) -> None:
        """Reattach; called by the link. See `NativeClient`."""
        self._map(fds)
        assert self.page.head == int.from_bytes(self.left[:8], "little")
        self.page.memory[HEAD_OFFSET:] = self.left
        self.page.pid = os.getpid()
        self.sock = socket.socket(fileno=bell_fd)
        self.rung = None

    def _unmap(self) -> None:
        for page in (self.page, self.worker, self.agent):
            page.close()
        self.log.close()

    def __enter__(self) -> ToyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.link.close()
        self.sock.close()
        self._unmap()

    def ring(self) -> None:
        """Ring once for each state of the agent's page."""
        if self.rung != self.agent.bell:
            self.rung = self.agent.bell
            self.send_bell()

    def send_bell(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the link handles it
            send_message(self.sock, Bell())

    def wait_hung_up(self) -> None:
        """Wait until the daemon has ended the connection."""
        self.sock.settimeout(WAIT_SECONDS)
        while self.sock.recv(4096):
            pass

    def append(self, text: str, kind: int = CALL, request: bool = False) -> int:
        """Append one record; return its end."""
        payload = text.encode()
        size = -(-(HEADER.size + len(payload)) // 8) * 8
        record = (HEADER.pack(size, kind, int(request), 0) + payload).ljust(size, b"\0")
        self.wait_agent(lambda: self.page.head + size - self.agent.retained <= len(self.log))
        offset = self.page.head % len(self.log)
        first = record[: len(self.log) - offset]
        self.log[offset : offset + len(first)] = first
        self.log[: size - len(first)] = record[len(first) :]
        if request:
            self.page.answer_wanted = self.page.head + size
        self.page.head += size
        self.page.operators += kind == CALL
        self.page.wake(ClientPage.head)
        over = self.page.head - self.agent.retained > self.agent.log_budget
        if self.agent.presence == Presence.ABSENT or over:
            self.ring()
        return self.page.head

    def add(self, number: int) -> None:
        """Change the state."""
        self.state = step(self.state, number)
        self.append(f"add {number}")

    def read(self, seconds: float = WAIT_SECONDS) -> int:
        """Request the worker's state."""
        end = self.append("", READ, request=True)
        deadline = time.monotonic() + seconds
        try:
            while True:
                bell = self.worker.bell
                if self.worker.answer_position == end:
                    break
                self.check(deadline)
                futex.wait(self.worker, WorkerPage.bell, bell, 0.05)
        finally:
            self.page.answer_wanted = 0
        answer = self.worker.memory[PAGE_BYTES : PAGE_BYTES + self.worker.answer_bytes]
        return int(struct.unpack("<Q", answer)[0])

    def want(self, wanted: int) -> bool:
        """Request memory; return True if it was granted."""
        self.page.memory_wanted = wanted
        self.page.want_sequence += 1
        self.page.wake(ClientPage.want_sequence)
        self.send_bell()
        self.wait_agent(lambda: self.agent.grant_sequence == self.page.want_sequence)
        return self.agent.refused_sequence != self.page.want_sequence

    def use(self, wanted: int) -> None:
        """Use memory, which the agent must grant."""
        assert self.agent.memory_granted >= wanted or self.want(wanted)
        self.page.memory_used = wanted

    def wait_agent(self, ready: Callable[[], object]) -> None:
        """Wait for the agent to change its page."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            bell = self.agent.bell
            if ready():
                return
            self.ring()
            self.check(deadline)
            futex.wait(self.agent, AgentPage.bell, bell, 0.05)

    def check(self, deadline: float) -> None:
        if self.agent.presence == Presence.ENDED:
            raise RuntimeError(self.agent.reason)
        if self.gone.is_set():
            raise RuntimeError("the daemon is gone")
        if time.monotonic() > deadline:
            raise TimeoutError("nothing came")

    @contextlib.contextmanager
    def cell(self) -> Iterator[None]:
        """Run a cell."""
        self.page.cells_running += 1
        self.page.cell_changed_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.page.cells_ended += 1
            self.page.cells_running -= 1
            self.page.cell_changed_ns = time.monotonic_ns()
            self.send_bell()
