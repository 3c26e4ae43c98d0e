"""Sharing of one device by users: equality of shares, and delay of a cell's start.

Real training programs under a separate daemon, with one device. Two users train side by side for a
while, and their execution times are compared at regular intervals. Then one user trains and another
one runs a cell from time to time: the cell's time is compared with that of the same cell alone.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.daemon import session
from jupyter_sing.controller.decision_log import read
from kernelproxy.common import paths
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import SetPolicy

USER = "JUPYTER_SING_USER"
PROGRAM = "mlp"
POLL_SECONDS = 0.25
#: Pauses between two cells of a user.
THINK_SECONDS = (0.1, 0.4, 1.0, 2.5)
DECISIONS_MAX = 10_000
POLICY = """
virtual_clusters:
  bench:
    users:
      - {name: premium, tier: premium}
      - {name: standard, tier: standard}
      - {name: basic, tier: basic}
      - {name: other, tier: basic}
"""
#: Tiers of the user who trains, and of the user who runs cells meanwhile.
PAIRS = (("basic", "premium"), ("standard", "standard"), ("basic", "basic"))


class TurnSide(Protocol):
    """A runner that executes orders."""

    def order(self, do: str, **arguments: Any) -> dict[str, Any]: ...


class Starts(Protocol):
    """A function that starts a runner under a named session."""

    def __call__(self, name: str) -> AbstractContextManager[TurnSide]: ...


@dataclass(frozen=True)
class Equality:
    """Equality of two users who train for `seconds`.

    Parameters
    ----------
    seconds : float
    served : tuple of float
        Execution time of each, in seconds.
    apart : float
        The largest difference at any sample.
    turns : int
        Turns that were ended for the other user.
    """

    seconds: float
    served: tuple[float, float]
    apart: float
    turns: int


@dataclass(frozen=True)
class Cells:
    """Cells of one user while another one trains.

    Parameters
    ----------
    holder, user : str
        Tiers of the user who trains, and of the user who runs cells.
    alone, meanwhile : list of float
        Seconds from the start of a cell to its result.
    """

    holder: str
    user: str
    alone: list[float]
    meanwhile: list[float]

    @property
    def waits(self) -> list[float]:
        """Extra seconds of cells compared with cells alone, sorted."""
        usual = statistics.median(self.alone)
        return sorted(max(0.0, each - usual) for each in self.meanwhile)


@dataclass(frozen=True)
class BenchmarkTurns:
    """All results of this benchmark."""

    equality: Equality
    cells: list[Cells]


def measure_turns(
    start: Starts,
    seconds: float,
    count: int,
    steps: int,
    pairs: Sequence[tuple[str, str]] = PAIRS,
) -> BenchmarkTurns:
    """Measure under the daemon given by the environment.

    Parameters
    ----------
    start : callable
    seconds : float
        Time for which two users train side by side.
    count : int
        Number of cells for each pair.
    steps : int
        Steps of a cell.
    pairs : sequence of tuple of str
        Tiers of the user who trains, and of the user who runs cells.
    """
    with agent_client.connect() as connection:
        connection.call(SetPolicy(POLICY))
    equality = _measure_equality(start, seconds)
    return BenchmarkTurns(equality, [_measure_cells(start, *pair, count, steps) for pair in pairs])


@contextmanager
def _as(user: str) -> Iterator[None]:
    before = os.environ.get(USER)
    os.environ[USER] = user
    try:
        yield
    finally:
        if before is None:
            del os.environ[USER]
        else:
            os.environ[USER] = before


@contextmanager
def _runner(start: Starts, name: str, user: str) -> Iterator[TurnSide]:
    with _as(user), start(name) as side:
        side.order("train", program=PROGRAM, steps=3)
        yield side


@contextmanager
def _training(side: TurnSide) -> Iterator[None]:
    """Train a program until the end of the block, without long pauses."""
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            side.order("train", program=PROGRAM, steps=200)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            yield
        finally:
            over.set()
            wait((training,))
    training.result()  # what was raised there


def _measure_equality(start: Starts, seconds: float) -> Equality:
    names = ("one", "two")
    with (
        _runner(start, names[0], "basic") as one,
        _runner(start, names[1], "other") as two,
        _training(one),
        _training(two),
    ):
        begin = [session(name)["gpu_seconds"] for name in names]
        until, apart = time.monotonic() + seconds, 0.0
        served = (0.0, 0.0)
        while time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            found = [session(name)["gpu_seconds"] for name in names]
            served = (found[0] - begin[0], found[1] - begin[1])
            apart = max(apart, abs(served[0] - served[1]))
    ended = sum(_preempted(name) for name in names)
    return Equality(seconds, served, apart, ended)


def _preempted(name: str) -> int:
    """Return how many turns of a session were ended for others."""
    return sum(each.kind == "preempt" for each in read(paths.runtime_dir(), name, DECISIONS_MAX))


def _measure_cells(start: Starts, holder: str, user: str, count: int, steps: int) -> Cells:
    cell = {"program": PROGRAM, "steps": steps}
    with (
        _runner(start, f"{holder} trains", holder) as one,
        _runner(start, f"{user} has cells", user) as two,
    ):
        alone = [two.order("train", **cell)["seconds"] for _ in range(count)]
        with _training(one):
            meanwhile = []
            for index in range(count):
                time.sleep(THINK_SECONDS[index % len(THINK_SECONDS)])
                meanwhile.append(two.order("train", **cell)["seconds"])
    return Cells(holder, user, alone, meanwhile)


def report(turns: BenchmarkTurns) -> list[str]:
    """Return the result as lines of Markdown."""
    found = turns.equality
    one, two = found.served
    lines = [
        f"Two users who train on one device for {found.seconds:.0f} s execute for {one:.1f} s and "
        f"{two:.1f} s; at no look were they more than {found.apart:.1f} s apart "
        f"({found.turns} turns were ended).",
        "",
        "How much longer a cell of a few steps takes while another user trains on its device:",
        "",
        "| trains | has cells | cells | alone, ms | waits: median, ms | worst, ms |",
        "|---|---|---|---|---|---|",
    ]
    for each in turns.cells:
        waits, alone = each.waits, statistics.median(each.alone)
        lines.append(
            f"| {each.holder} | {each.user} | {len(waits)} | {alone * 1e3:.1f}"
            f" | **{statistics.median(waits) * 1e3:.1f}** | {waits[-1] * 1e3:.1f} |"
        )
    return lines
