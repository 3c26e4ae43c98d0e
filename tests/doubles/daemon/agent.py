"""Agent double for one session, controlled by its test, and a worker that executes nothing.

The log is real, and so is the client at its other end.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Attach, Attached, Done, Error, Leave, Left, Listen, Message
from kernelproxy.common.shared_memory import (
    PAGE_BYTES,
    ClientPage,
    Presence,
    SessionMemory,
    WorkerPage,
    close_all,
)
from tests.doubles.daemon.zygote import HEADER
from tests.doubles.session import futex

LOG_BYTES = 1 << 20
SECONDS = 60.0
Others = Callable[[socket.socket, Message, list[int]], None]


class FakeWorker:
    """Consumes a log, checks that records are contiguous, and answers requests with nothing."""

    def __init__(self, memory: SessionMemory) -> None:
        self.memory, self.records = memory, 0
        self.gate = threading.Event()
        self.gate.set()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending = True
        self.gate.set()
        self._thread.join()

    def _run(self) -> None:
        client, page = self.memory.client, self.memory.worker
        while not self._ending:
            head = client.head
            if head == page.consumed or not self.gate.wait(0.02):
                futex.wait(client, ClientPage.head, head, 0.02)
                continue
            self._execute(page.consumed)

    def _execute(self, at: int) -> None:
        page = self.memory.worker
        header = os.pread(self.memory.fds[0], HEADER.size, at % LOG_BYTES)
        size, _, request, _ = HEADER.unpack(header)
        assert size >= HEADER.size, "what follows is no record"
        self.records += 1
        if request and self.memory.client.answer_wanted == at + size:
            page.answer_status, page.answer_bytes, page.answer_produced = 0, 0, 0
            page.answer_position = at + size
        page.consumed = at + size
        page.bell = (page.bell + 1) & 0xFFFFFFFF
        page.wake(WorkerPage.bell)


class OneKernelAgent:
    """Listens at a socket and serves one kernel, with the session that it names.

    Parameters
    ----------
    path : Path
    others : callable, optional
        Called in a thread with each connection that is not the kernel's link, with its first
        message and the descriptors that came with it.
    """

    def __init__(self, path: Path, others: Others | None = None) -> None:
        self._others = others
        self.sessions: dict[str, SessionMemory] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.hellos: queue.Queue[Attach | Listen] = queue.Queue()
        self.said: queue.Queue[Left | Error | None] = queue.Queue()
        self._channel: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def open(self, name: str) -> SessionMemory:
        """Create a session with a worker."""
        memory = SessionMemory(LOG_BYTES)
        memory.agent.memory_granted = memory.agent.memory_total = 1 << 30
        memory.agent.log_budget = LOG_BYTES
        memory.agent.threads = 1
        memory.agent.presence = Presence.PRESENT
        self.sessions[name] = memory
        self.workers[name] = FakeWorker(memory)
        return memory

    def open_copy(self, name: str, of: str, head: int | None = None) -> SessionMemory:
        """Create a copy of a session at the same position, or at `head` without a worker."""
        source, memory = self.sessions[of], SessionMemory(LOG_BYTES)
        for part in ("client", "worker", "agent"):
            getattr(memory, part).memory[:PAGE_BYTES] = getattr(source, part).memory[:PAGE_BYTES]
        memory.agent.retained = memory.worker.consumed
        self.sessions[name] = memory
        if head is None:
            self.workers[name] = FakeWorker(memory)
        else:
            memory.client.head = head
        return memory

    def drained(self, name: str) -> bool:
        """True if everything in a session's log was executed."""
        memory = self.sessions[name]
        return memory.worker.consumed == memory.client.head

    def send(self, message: Message) -> None:
        """Send a message to the kernel."""
        assert self._channel is not None
        send_message(self._channel, message)

    def leave(self) -> Left | Error:
        """Detach the kernel; return its reply."""
        self.send(Leave())
        said = self.said.get(timeout=SECONDS)
        assert said is not None
        if isinstance(said, Left):
            assert self.said.get(timeout=SECONDS) is None  # and it disconnects
        return said

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._channel is not None:
            self._channel.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for worker in self.workers.values():
            worker.close()
        for memory in self.sessions.values():
            memory.close()

    def _serve(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._receive, args=(channel,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _receive(self, channel: socket.socket) -> None:
        with channel:
            hello, fds = recv_message(channel)
            if not isinstance(hello, Attach | Listen):
                assert self._others is not None
                self._others(channel, hello, fds)
                close_all(fds)
                return
            if isinstance(hello, Listen):
                send_message(channel, Done())
            else:
                fds = self.sessions[hello.session].kernel_fds()
                send_message(channel, Attached(hello.session), fds)
                close_all(fds)
            self._channel = channel
            self.hellos.put(hello)
            try:
                while True:
                    message, _ = recv_message(channel)
                    if isinstance(message, Left | Error):
                        self.said.put(message)
            except OSError:
                if self._channel is channel:
                    self._channel = None
                    self.said.put(None)


def wake(pid: int, fd: int, **line: object) -> None:
    """End the detached state of a process."""
    with open(f"/proc/{pid}/fd/{fd}", "wb") as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")
