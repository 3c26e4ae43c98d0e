"""A zygote without torch, whose workers execute a toy language from the real log.

A call's payload is text: ``add N`` (the state, one number, changes so that order and repetition
show), ``die``, ``die-until PATH`` (while that file lacks), ``wait PATH`` (until it is there),
``hang``, ``corrupt``. A read is answered with the state.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from kernelproxy import zygote
from kernelproxy.oplog import ANSWER_RING_BYTES, PAGE_BYTES, AgentPage, ClientPage, WorkerPage
from kernelproxy.protocol import (
    Done,
    End,
    Ended,
    Error,
    Gate,
    Open,
    Opened,
    SnapshotTaken,
    TakeSnapshot,
    ZygoteReady,
    recv_message,
    send_message,
)
from tests.doubles import futex

HEADER = struct.Struct("<IBBH")
CALL, READ = 3, 5
SNAPSHOT = struct.Struct("<QQ")


def step(state: int, number: int) -> int:
    """The next state: depends on every number so far, and on their order."""
    return (state * 1_000_003 + number + 1) % (1 << 64)


class ToyWorker:
    """Executes one session's log."""

    def __init__(self, control: socket.socket, order: Open, fds: list[int]) -> None:
        self.control, self.skip = control, set(order.skip)
        self.log = mmap.mmap(fds[0], 0, access=mmap.ACCESS_READ)
        self.client = ClientPage(fds[1], writable=False)
        self.page = WorkerPage(fds[2], writable=True, extra_bytes=ANSWER_RING_BYTES)
        self.agent = AgentPage(fds[3], writable=False)
        self.state, self.at = 0, 0
        if order.snapshot:
            self.at, self.state = SNAPSHOT.unpack(os.pread(fds[4], SNAPSHOT.size, 0))
        self.page.consumed = self.at
        self.page.epoch, self.page.pid = order.epoch, os.getpid()
        self.page.gate_open = int(order.gate)
        self.ending = False
        self.between = threading.Lock()  # held while a record is executed
        self.gate = threading.Event()
        self.gate.set()

    def run(self) -> str | None:
        """Execute until told to end; return what is corrupt, or None."""
        while not self.ending:
            head = self.client.head
            if head == self.at or not self.gate.is_set():
                futex.wait(self.client, ClientPage.head, head, 0.02)
                continue
            with self.between:
                if not self.gate.is_set() or self.ending:
                    continue
                started = time.monotonic_ns()
                corrupt = self.execute()
                if corrupt:
                    return corrupt
                self.page.busy_ns += time.monotonic_ns() - started
                self.page.consumed = self.at
                if self.client.head == self.at:
                    self.page.active_ns = time.monotonic_ns()
        return None

    def execute(self) -> str | None:
        """Execute one record; return what is corrupt, or None."""
        size, kind, request, _ = HEADER.unpack(self.read(self.at, HEADER.size))
        payload = self.read(self.at + HEADER.size, size - HEADER.size).rstrip(b"\0")
        end = self.at + size
        if kind == CALL and self.at not in self.skip:
            verb, _, argument = payload.decode().partition(" ")
            if verb == "add":
                self.state = step(self.state, int(argument))
            elif verb == "die" or (verb == "die-until" and not Path(argument).exists()):
                os.kill(os.getpid(), signal.SIGSEGV)
            elif verb == "hang":
                signal.pause()
            elif verb == "wait":
                while not Path(argument).exists() and not self.ending:
                    time.sleep(0.01)
            elif verb == "corrupt":
                return f"position {self.at}: a bad record"
        if request and self.client.answer_wanted == end:
            self.answer(end, struct.pack("<Q", self.state))
        self.at = end
        return None

    def answer(self, position: int, data: bytes) -> None:
        page = self.page
        page.memory[PAGE_BYTES : PAGE_BYTES + len(data)] = data
        page.answer_status, page.answer_bytes = 0, len(data)
        page.answer_produced, page.answer_position = len(data), position
        page.bell = (page.bell + 1) & 0xFFFFFFFF
        page.wake(WorkerPage.bell)

    def read(self, position: int, count: int) -> bytes:
        offset = position % len(self.log)
        first = self.log[offset : offset + count]
        return first + self.log[: count - len(first)]

    def take_orders(self) -> None:
        try:
            while True:
                order, _ = recv_message(self.control)
                if isinstance(order, Gate):
                    (self.gate.set if order.open else self.gate.clear)()
                    self.page.gate_open = int(order.open)
                    send_message(self.control, Done())
                elif isinstance(order, TakeSnapshot):
                    self.send_snapshot()
                elif isinstance(order, End):
                    self.ending = True
        except OSError:
            os._exit(0)

    def send_snapshot(self) -> None:
        with self.between:
            fd = os.memfd_create("toy-snapshot")
            os.write(fd, SNAPSHOT.pack(self.at, self.state))
            send_message(self.control, SnapshotTaken(self.at, SNAPSHOT.size), [fd])
            os.close(fd)


def main(control: socket.socket) -> None:
    """Run a toy worker."""
    order, fds = recv_message(control)
    assert isinstance(order, Open)
    if Path(os.environ.get("TOY_REFUSE", "/nonexistent")).exists():
        send_message(control, Error("the toy refuses", "failed"))
        return
    toy = ToyWorker(control, order, fds)
    send_message(control, Opened())
    threading.Thread(target=toy.take_orders, daemon=True).start()
    corrupt = toy.run()
    if corrupt:
        send_message(control, Ended(corrupt))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        zygote.serve(agent, ZygoteReady("2.13.0+toy", "toy", "toy"), main)
