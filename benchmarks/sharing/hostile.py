"""Delay of one user's cells while another user attacks, under a system-wide daemon.

Alice runs short cells, and sends the daemon a request over a new connection after each. Bob has a
hundred connections, from one process of the lowest priority, so that the measurement shows the
attack's load on the daemon, not on the CPU. Periods with and without an attack alternate.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.doubles.daemon.system import SharedMachine, build

ALICE, BOB = 61001, 61002
CONNECTIONS = 100
#: After this time an attack has made all its connections, and has used up its initial limits.
_BEGIN_SECONDS = 0.5
_READY_SECONDS = 120.0
MIB = 1 << 20

CELLS = """
import os, sys, time, torch
from kernelproxy.kernel import activation
from kernelproxy.common.ipc import agent_client as control
from kernelproxy.common.protocol import StatusRequest
numbers = torch.ones(256, device="cuda")
while not os.path.exists(sys.argv[1]):
    activation.cell(1)
    begin = time.monotonic()
    (numbers + 1).sum().item()
    end = time.monotonic()
    activation.cell(-1)
    asked = time.monotonic()
    with control.connect(start=False) as daemon:
        daemon.call(StatusRequest(), 60)
    print(begin, end - begin, time.monotonic() - asked, flush=True)
    time.sleep(0.03)
"""

#: Bob's program. Each attack is a generator that is advanced in an endless loop without waiting.
ATTACK = """
import itertools, os, random, socket, struct, sys, time
from kernelproxy.common import paths
from kernelproxy.common.ipc.framing import encode
from kernelproxy.common.protocol import (
    ActivityRequest, Carried, CheckpointsRequest, CloseSession, OpenSession, Prepare, StatusRequest,
    WatchRequest, Why,
)
path, attack, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.nice(19)

def connect():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        return None
    return sock

def frame(body):
    return struct.pack("<I", len(body)) + body

def long(inside):
    head = b'{"kind":"Carried","session":"s","verb":"v","name":"n","problem":"","outcome":{"a":['
    return frame(head + inside + b"]}}")

def pour(data, fds=(), step=1 << 20):
    # The same over all connections, again and again; what is closed is opened anew.
    every = {}
    while True:
        for number in range(count):
            sock, left = every.get(number) or (connect(), memoryview(data))
            if sock is None:
                continue
            try:
                if fds:
                    left = left[socket.send_fds(sock, [left[:step]], fds):]
                else:
                    left = left[sock.send(left[:step]):]
                every[number] = sock, left or memoryview(data)
            except BlockingIOError:
                every[number] = sock, left
            except OSError:
                sock.close()
                every.pop(number, None)
                continue
            try:
                while len(sock.recv(1 << 16)) == 1 << 16:
                    pass
            except BlockingIOError:
                pass
            except OSError:
                sock.close()
                every.pop(number, None)
        yield

def connects():
    while True:
        held = [connect() for _ in range(count)]
        for each in held:
            if each is not None:
                each.close()
        yield

def slow():
    # Frames that never end, a byte at a time.
    return pour(struct.pack("<I", 60000) + b'{"kind":"Status"' + b" " * 50000, step=1)

def sessions():
    # As many as a user may have are opened, and closed by the end of their connections.
    asked = b"".join(
        encode(OpenSession(f"n{number}", f"k{number}", sys.executable)) for number in range(64)
    )
    while True:
        held = [each for each in (connect() for _ in range(4)) if each is not None]
        for each in held:
            try:
                each.send(asked)
            except OSError:
                pass
        yield
        time.sleep(0.05)
        for each in held:
            each.close()

MIXED = [
    StatusRequest(), CheckpointsRequest(), ActivityRequest(0.0, 1.0), Why("none", 10000),
    CloseSession("none"),
]
memory = os.memfd_create("memory")
ATTACKS = {
    "15 MiB of nested lists": lambda: pour(frame(b"[" * (15 << 20))),
    "8 MiB of lists in a list": lambda: pour(long(b"[]," * 2_700_000 + b"[]")),
    "90,000 lists in a list": lambda: pour(long(b"[]," * 90_000 + b"[]")),
    "huge numbers": lambda: pour(long(b"1" + b"0" * 400 + b"," + b"9" * 4000)),
    "a number of 7 MB": lambda: pour(long(b"9" * 7_000_000)),
    "small requests": lambda: pour(b"".join(map(encode, MIXED)) * 50),
    "watching": lambda: pour(encode(WatchRequest())),
    "descriptors": lambda: pour(encode(StatusRequest()), fds=[memory] * 4),
    "pieces of frames": slow,
    "connections": connects,
    "sessions": sessions,
}
if attack == "?":
    print(*ATTACKS, sep="\\n")
else:
    for _ in ATTACKS[attack]():
        time.sleep(0.001)
"""


@dataclass(frozen=True)
class Attack:
    """Effect of one attack on another user.

    Parameters
    ----------
    name : str
    cells, answers : tuple of (float, float)
        Median and worst seconds of a cell, and of a new connection's first answer, without the
        attack and, in the next two, with it.
    count : int
        Number of cells during the attack.
    memory : int
        Peak memory of the daemon during the attack, in bytes.
    """

    name: str
    cells: tuple[float, float, float, float]
    answers: tuple[float, float, float, float]
    count: int
    memory: int


class _Alice:
    """Runs cells, and notes the time of each."""

    def __init__(self, machine: SharedMachine) -> None:
        script = machine.base / "cells.py"
        script.write_text(CELLS)
        script.chmod(0o644)
        self._over = machine.base / "over"
        run = ("-u", "-m", "jupyter_sing.cli", "run", "--name", "alice", str(script))
        self._process = machine.start(ALICE, *run, str(self._over))
        #: Start time, seconds of the cell, seconds of the answer.
        self.cells: list[tuple[float, float, float]] = []
        self._some = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        if not self._some.wait(_READY_SECONDS):
            raise RuntimeError("no cell ran")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            begin, cell, answer = map(float, line.split())
            self.cells.append((begin, cell, answer))
            self._some.set()

    def end(self) -> None:
        """End after the current cell."""
        self._over.touch()
        self._reading.join(_READY_SECONDS)

    def between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Wait for the cells begun in a period, and return their times."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self.cells or self.cells[-1][0] < end:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                assert self._process.stderr is not None
                raise RuntimeError(f"cells run no more: {self._process.stderr.read()[-2000:]}")
            time.sleep(0.01)
        return [(cell, answer) for at, cell, answer in self.cells if begin <= at < end]


def attacks(machine: SharedMachine) -> list[str]:
    """Return the names of all attacks."""
    return machine.program(BOB, ATTACK, "-", "?", "0").splitlines()


@contextmanager
def _underway(machine: SharedMachine, name: str) -> Iterator[None]:
    socket = str(machine.run / "agent.sock")
    bob = machine.start(BOB, "-c", ATTACK, socket, name, str(CONNECTIONS))
    try:
        time.sleep(_BEGIN_SECONDS)
        yield
        if bob.poll() is not None:
            raise RuntimeError(f"{name} ended: {bob.communicate()[1]}")
    finally:
        bob.kill()
        bob.communicate()


def measure_attack(
    machine: SharedMachine, alice: _Alice, daemon: int, name: str, seconds: float, rounds: int
) -> Attack:
    """Measure without and with one attack, alternately."""
    plain: list[tuple[float, float]] = []
    harmed: list[tuple[float, float]] = []
    memory = 0
    for _ in range(rounds):
        begin = time.monotonic()
        time.sleep(seconds)
        plain += alice.between(begin, time.monotonic())
        Path(f"/proc/{daemon}/clear_refs").write_text("5")  # the peak, from now on
        with _underway(machine, name):
            begin = time.monotonic()
            time.sleep(seconds)
            harmed += alice.between(begin, time.monotonic())
        memory = max(memory, _peak(daemon))
    cells, answers = (
        _worths([each[which] for each in plain], [each[which] for each in harmed])
        for which in (0, 1)
    )
    return Attack(name, cells, answers, len(harmed), memory)


def _worths(plain: Sequence[float], harmed: Sequence[float]) -> tuple[float, float, float, float]:
    return statistics.median(plain), max(plain), statistics.median(harmed), max(harmed)


def _peak(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no VmHWM")


def _measure_all(
    machine: SharedMachine, seconds: float, rounds: int, count: int | None, names: Sequence[str]
) -> list[Attack]:
    asking = (
        "from kernelproxy.common.ipc import agent_client; print(agent_client.connect().daemon_pid)"
    )
    daemon = int(machine.program(0, asking))
    alice = _Alice(machine)
    try:
        return [
            measure_attack(machine, alice, daemon, name, seconds, rounds)
            for name in (names or attacks(machine))[:count]
        ]
    finally:
        alice.end()


def measure_hostile(
    seconds: float, rounds: int, count: int | None = None, names: Sequence[str] = ()
) -> list[Attack]:
    """Measure all attacks, or some, under a separate daemon; requires root.

    Parameters
    ----------
    seconds : float
        Length of the periods with and without an attack, in each round.
    rounds : int
        Number of rounds for each attack.
    count : int, optional
        Number of attacks; by default all.
    names : sequence of str, optional
        Names of attacks; by default all.
    """
    base = Path(tempfile.mkdtemp(prefix="sing-hostile-"))
    try:
        base.chmod(0o755)
        machine = SharedMachine(base / "machine", build(base))
        started = machine.start_daemon()
        if started.returncode:
            raise RuntimeError(started.stderr)
        try:
            return _measure_all(machine, seconds, rounds, count, names)
        finally:
            machine.end([ALICE, BOB])
    finally:
        shutil.rmtree(base)


def report(found: Sequence[Attack]) -> list[str]:
    """Return the result as lines of Markdown."""

    def times(each: tuple[float, float, float, float]) -> str:
        before, worst_before, after, worst = (1e3 * value for value in each)
        return f"{before:.1f}, {worst_before:.0f} | {after:.1f}, **{worst:.0f}**"

    return [
        f"Two users of a daemon for the system. One runs short cells; the other has {CONNECTIONS}",
        "connections, over which a process sends as fast as it can. Median and worst ms of a cell,",
        "and of a connection with one answer, without and with that; memory of the daemon at most.",
        "",
        "| the other user sends | cells | cell, without | with | answer, without | with | MB |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {each.name} | {each.count} | {times(each.cells)} | {times(each.answers)} "
            f"| {each.memory / 1e6:.0f} |"
            for each in found
        ),
    ]


if __name__ == "__main__":
    print("\n".join(report(measure_hostile(2.0, 2, names=sys.argv[1:]))))
