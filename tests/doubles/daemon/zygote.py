"""A zygote without torch, whose workers execute a toy language from the real log.

A call's payload is text: ``add N`` (changes the state, one number, so that order and repetition
matter), ``die``, ``die-until PATH`` (dies while that file does not exist), ``wait PATH`` (until it
exists), ``hang``, ``hang-until PATH`` and ``spin-until PATH`` (asleep, and using the processor),
``corrupt``. A read is answered with the state. A worker that begins a call with a PATH creates
PATH.begun. While the file that ``TOY_SLOW`` names exists, no worker becomes ready.

``fault CODE`` makes its device reject all further work, as a kernel on a GPU does: the worker
notices that when it reads, has nothing to execute, takes a snapshot or gives its lease back, and at
once if it is careful there. With ``hidden-fault CODE`` it does not notice that when it is idle, and
``fault-once CODE PATH`` is a fault if that file does not exist, which it then makes.

A worker may host several sessions, each in threads of its own.

If ``TOY_ALONE`` names a file, a worker that executes at the same time as another one reports a
corrupt log. With ``TOY_COUNTS_LATE``, a read that was answered counts as executed only when a
snapshot is asked for.

Its snapshots have the format of real ones. The state is in one extent of the arena, which is never
the extent of the snapshot before.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from pathlib import Path

from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    EXIT_DEVICE_LOST,
    EXIT_NO_ROOM,
    Adopt,
    ContentsListed,
    Depart,
    Departed,
    DeviceLost,
    Done,
    End,
    Ended,
    Error,
    Frozen,
    Gate,
    Host,
    Lease,
    ListContents,
    NeedRoom,
    Observe,
    Observed,
    Open,
    Opened,
    Preallocate,
    Quiesced,
    Replay,
    RoomMade,
    SnapshotTaken,
    TakeSnapshot,
    Trim,
    ZygoteReady,
    snapshot_tables,
)
from kernelproxy.common.shared_memory import (
    ANSWER_RING_BYTES,
    PAGE_BYTES,
    AgentPage,
    ClientPage,
    WorkerPage,
)
from kernelproxy.worker import zygote
from tests.doubles.session import futex

HEADER = struct.Struct("<IBBH")
CALL, READ = 3, 5
EXTENT_BYTES = 8192
STATE = struct.Struct("<Q")


def step(state: int, number: int) -> int:
    """Return the next state, which depends on all numbers so far and on their order."""
    return (state * 1_000_003 + number + 1) % (1 << 64)


class ToyWorker:
    """Executes one session's log."""

    def __init__(self, control: socket.socket, order: Open, fds: list[int]) -> None:
        self.control, self.skip = control, set(order.skip)
        self.log = mmap.mmap(fds[0], 0, access=mmap.ACCESS_READ)
        self.client = ClientPage(fds[1], writable=False)
        self.page = WorkerPage(fds[2], writable=True, extra_bytes=ANSWER_RING_BYTES)
        self.agent = AgentPage(fds[3], writable=False)
        self.arena, self.epoch = fds[4], order.epoch
        self.state, self.at = 0, 0
        self.careful_until = order.careful_until
        self.fault, self.hidden = 0, False  # code of the error of its device
        self.extent = snapshot_tables.ArenaExtent(0, 0, 0, 0)  # of the newest snapshot
        self.versions = order.epoch << 40
        self.readiness = -1  # page with readiness flags, until the state was read from the arena
        if order.prepare and not order.snapshot:
            raise ValueError("there is no state to prepare")
        if order.carried:
            self.arrive(fds[5], fds[7], fds[8] if order.base else -1)
        elif order.snapshot:
            self.load(fds[5], fds[6] if order.readiness else -1)
        self.ending = False
        self.room_made, self.snapshot_asked = threading.Event(), threading.Event()
        self.between = threading.Lock()  # held while a record is executed
        self.gate = threading.Event()
        self.claimed = False
        self.leased, self.token, self.replaying = False, 0, 0
        alone = os.environ.get("TOY_ALONE")
        self.alone = os.open(alone, os.O_RDWR | os.O_CREAT) if alone else -1
        if not order.prepare:
            self.claim()
            self.open_gate(order.gate)

    def load(self, fd: int, readiness: int) -> None:
        """Load the state from a snapshot."""
        found = snapshot_tables.read_tables(fd)
        (self.extent,) = found.extents
        self.at, self.readiness = found.position, readiness
        if readiness < 0:
            self.fetch()

    def arrive(self, tables: int, carried: int, base: int) -> None:
        """Load the state that another process has sent."""
        self.at = snapshot_tables.read_tables(tables).position
        (self.state,) = STATE.unpack(os.pread(carried, STATE.size, 0))
        if base >= 0:
            (self.extent,) = snapshot_tables.read_tables(base).extents

    def fetch(self) -> None:
        """Read the state, once it is in the arena."""
        while self.readiness >= 0 and (there := os.pread(self.readiness, 1, PAGE_BYTES)) != b"\1":
            if there == b"\2":
                os._exit(1)  # loading has failed
            os.pwrite(self.readiness, b"\1", 2 * PAGE_BYTES)  # request it now
            time.sleep(0.01)
        (self.state,) = STATE.unpack(os.pread(self.arena, STATE.size, self.extent.offset))
        self.readiness = -1

    def claim(self) -> None:
        """Become the session's worker."""
        self.page.consumed = self.at
        self.page.epoch, self.page.pid = self.epoch, os.getpid()
        self.claimed = True

    def open_gate(self, is_open: bool) -> None:
        if not self.claimed and is_open:
            self.claim()
        (self.gate.set if is_open else self.gate.clear)()
        if self.claimed:
            self.page.gate_open = int(is_open)

    def take_lease(self, order: Lease) -> None:
        """Apply a lease, unless it is stale."""
        if order.token >= self.token:
            self.token, self.leased = order.token, order.given
        if not order.given:
            with self.between:
                self.ask_device()
                send_message(self.control, Quiesced(order.token))

    def allowed(self) -> bool:
        """True if it may execute."""
        return self.gate.is_set() and (self.leased or self.at < self.replaying)

    def run(self) -> str | None:
        """Execute until ordered to end; return an error if the log is corrupt, or None."""
        while not self.ending:
            head = self.client.head
            if head == self.at or not self.allowed():
                if not self.hidden:
                    self.ask_device()
                futex.wait(self.client, ClientPage.head, head, 0.02)
                continue
            with self.between:
                if not self.allowed() or self.ending:
                    continue
                started = time.monotonic_ns()
                corrupt = self.execute_alone()
                if corrupt:
                    return corrupt
                self.page.busy_ns += time.monotonic_ns() - started
                self.page.dirty_bytes = int(os.environ.get("TOY_DIRTY", "0"))
                self.page.consumed = self.at
                if self.client.head == self.at:
                    self.page.active_ns = time.monotonic_ns()
        return None

    def execute_alone(self) -> str | None:
        """Execute one record, and check that no other worker executes."""
        if self.alone < 0:
            return self.execute()
        try:
            fcntl.flock(self.alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "two execute at once"
        try:
            return self.execute()
        finally:
            fcntl.flock(self.alone, fcntl.LOCK_UN)

    def execute(self) -> str | None:
        """Execute one record; return an error if it is corrupt, or None."""
        size, kind, request, _ = HEADER.unpack(self.read(self.at, HEADER.size))
        payload = self.read(self.at + HEADER.size, size - HEADER.size).rstrip(b"\0")
        end = self.at + size
        if self.readiness >= 0:
            self.fetch()
        if kind == CALL and self.at not in self.skip:
            verb, _, argument = payload.decode().partition(" ")
            if argument.startswith("/"):
                Path(f"{argument}.begun").touch()
            if verb == "add":
                self.state = step(self.state, int(argument))
            elif verb == "die" or (verb == "die-until" and not Path(argument).exists()):
                signal.raise_signal(signal.SIGSEGV)  # in this thread, at once
            elif verb == "hang" or (verb == "hang-until" and not Path(argument).exists()):
                signal.pause()
            elif verb == "spin-until":
                while not Path(argument).exists() and not self.ending:
                    pass
            elif verb == "wait":
                while not Path(argument).exists() and not self.ending:
                    time.sleep(0.01)
            elif verb == "ask-for-room":  # as a worker whose device has none for an operator
                send_message(self.control, NeedRoom())
                if self.room_made.wait(20):
                    Path(argument).touch()
            elif verb == "room-until" and Path(argument).exists():  # there is none any more
                os._exit(EXIT_NO_ROOM)
            elif verb == "corrupt":
                return f"position {self.at}: a bad record"
            elif verb in ("fault", "hidden-fault"):
                self.fault, self.hidden = int(argument), verb == "hidden-fault"
            elif verb == "fault-once":
                code, _, path = argument.partition(" ")
                self.fault = 0 if Path(path).exists() else int(code)
                Path(path).touch()
        if request or self.at < self.careful_until:
            self.ask_device()
        if request and self.client.answer_wanted == end:
            self.snapshot_asked.clear()
            self.answer(end, struct.pack("<Q", self.state))
            if os.environ.get("TOY_COUNTS_LATE"):
                self.snapshot_asked.wait(20)
        self.at = end
        return None

    def ask_device(self) -> None:
        """End this process if its device rejects all further work."""
        if self.fault:
            lost = DeviceLost(self.fault, f"CUDA error: {self.fault}", "toy::fault")
            send_message(self.control, lost)
            os._exit(EXIT_DEVICE_LOST)

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

    def take_orders(self, process: ToyProcess) -> None:
        try:
            while True:
                order, fds = recv_message(self.control)
                if isinstance(order, Gate):
                    self.open_gate(order.open)
                elif isinstance(order, Adopt):
                    self.load(fds[0], -1)
                elif isinstance(order, TakeSnapshot):
                    self.send_snapshot(order)
                elif isinstance(order, Depart):
                    self.depart()
                elif isinstance(order, Lease):
                    self.take_lease(order)
                elif isinstance(order, Host):
                    process.begin(socket.socket(fileno=fds[0]))
                elif isinstance(order, RoomMade):
                    self.room_made.set()
                elif isinstance(order, Observe):
                    send_message(self.control, Observed(0))
                elif isinstance(order, Replay):
                    self.replaying = order.until
                    self.open_gate(True)
                    while self.at < order.until:
                        time.sleep(0.001)
                if isinstance(order, Gate | Adopt | Preallocate | Trim | Replay):
                    send_message(self.control, Done())
                elif isinstance(order, End):
                    self.ending = True
        except OSError:
            self.ending = True

    def send_snapshot(self, order: TakeSnapshot) -> None:
        self.snapshot_asked.set()
        with self.between:
            self.ask_device()
            if order.tell:
                send_message(self.control, Frozen())
            if self.readiness >= 0:
                self.fetch()
            self.versions += 1
            offset = 0 if self.extent.offset else EXTENT_BYTES
            self.extent = snapshot_tables.ArenaExtent(offset, EXTENT_BYTES, 1, self.versions)
            os.pwrite(self.arena, STATE.pack(self.state).ljust(EXTENT_BYTES, b"."), offset)
            fd = self.tables(offset)
            stalled = int(os.environ.get("TOY_STALLED_NS", "0"))
            taken = SnapshotTaken(self.at, EXTENT_BYTES, EXTENT_BYTES, stalled, 0.0)
            send_message(self.control, taken, [fd])
            os.close(fd)
            self.page.dirty_bytes = 0

    def tables(self, offset: int) -> int:
        """Return the tables of a snapshot."""
        total = snapshot_tables.HEADER.size + snapshot_tables.ENTRY.size
        header = snapshot_tables.HEADER.pack(
            snapshot_tables.MAGIC, snapshot_tables.VERSION, 0, self.at, total, EXTENT_BYTES,
            snapshot_tables.HEADER.size, 1, 0,
        )  # fmt: skip
        entry = snapshot_tables.ENTRY.pack(offset, EXTENT_BYTES, 1, 0, self.versions)
        fd = os.memfd_create("toy-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, header + entry)
        return fd

    def depart(self) -> None:
        """Send what another process needs to continue here."""
        with self.between:
            self.ask_device()
            self.versions += 1
            contents, carried = (
                os.memfd_create(f"toy-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                for name in ("contents", "carried")
            )
            os.write(carried, STATE.pack(self.state))
            fds = [self.tables(0), contents, carried]
            send_message(self.control, Departed(STATE.size, 0), fds)
            for each in fds:
                os.close(each)


class ToyProcess:
    """The sessions of one process; it ends with the last one."""

    def __init__(self) -> None:
        self.count, self.changed = 0, threading.Condition()

    def begin(self, control: socket.socket) -> None:
        """Serve a connection."""
        with self.changed:
            self.count += 1
        threading.Thread(target=self.serve, args=(control,), daemon=True).start()

    def serve(self, control: socket.socket) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                run(control, self)
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        with self.changed:
            self.count -= 1
            self.changed.notify()
            if self.count:  # otherwise it ends with the process
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """Wait until there are no sessions."""
        with self.changed:
            self.changed.wait_for(lambda: self.count == 0)


def main(control: socket.socket) -> None:
    """Run a toy worker."""
    process = ToyProcess()
    process.begin(control)
    process.wait()


def run(control: socket.socket, process: ToyProcess) -> None:
    """Execute a session until it ends."""
    order, fds = recv_message(control)
    if isinstance(order, ListContents):
        nothing = os.memfd_create("toy-contents", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        send_message(control, ContentsListed(), [nothing])
        os.close(nothing)
        order, fds = recv_message(control)
    assert isinstance(order, Open)
    refusing = Path(os.environ.get("TOY_REFUSE", "/nonexistent"))
    if refusing.exists():
        full = refusing.read_text() == "full"
        why = "CUDA out of memory. Tried to allocate 2 GiB." if full else "the toy refuses"
        send_message(control, Error(why, "no-room" if full else "failed"))
        return
    while Path(os.environ.get("TOY_SLOW", "/nonexistent")).exists():
        time.sleep(0.5)
    toy = ToyWorker(control, order, fds)
    send_message(control, Opened())
    threading.Thread(target=toy.take_orders, args=(process,), daemon=True).start()
    corrupt = toy.run()
    if corrupt:
        send_message(control, Ended(corrupt))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        zygote.serve(agent, ZygoteReady("2.13.0+toy", "toy", "toy"), main)
