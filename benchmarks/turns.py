"""What users meet who share one device: how equally, and how soon a cell begins.

Real training programs under a daemon of their own, with one device. Two users train side by side
for a while, and what each has executed is compared at every look. Then one user trains and another
one runs a cell now and then: the cell's time is compared with that of the same cell alone.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.daemon import session
from jupyter_sing.controller.decision_log import read
from kernelproxy.common import paths
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import SetPolicy

USER = "JUPYTER_SING_USER"
PROGRAM = "mlp"
LOOK_SECONDS = 0.25
#: Between two cells of a user.
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
#: Who trains, and who runs cells meanwhile.
PAIRS = (("basic", "premium"), ("standard", "standard"), ("basic", "basic"))


class Side(Protocol):
    """A runner that takes orders."""

    def order(self, do: str, **arguments: Any) -> dict[str, Any]: ...
    def __enter__(self) -> Side: ...
    def __exit__(self, *_: object) -> None: ...


class Starts(Protocol):
    """Starts a runner under a session of a name."""

    def __call__(self, name: str) -> Side: ...


@dataclass(frozen=True)
class Equality:
    """Two users who train for so many seconds.

    Parameters
    ----------
    seconds : float
    served : tuple of float
        Seconds that each has executed.
    apart : float
        The largest difference at any look.
    turns : int
        Turns that ended for the other one's sake.
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
        Tiers of who trains, and of who runs cells.
    alone, meanwhile : list of float
        Seconds of a cell from asking to its result.
    """

    holder: str
    user: str
    alone: list[float]
    meanwhile: list[float]

    @property
    def waits(self) -> list[float]:
        """Seconds that cells took longer than alone, in order of size."""
        usual = statistics.median(self.alone)
        return sorted(max(0.0, each - usual) for each in self.meanwhile)


@dataclass(frozen=True)
class Turns:
    """All of these."""

    equality: Equality
    cells: list[Cells]


def measure_turns(start: Starts, seconds: float, count: int, steps: int) -> Turns:
    """Measure under the daemon that the environment names.

    Parameters
    ----------
    start : callable
    seconds : float
        How long two users train side by side.
    count : int
        Cells of each pair.
    steps : int
        Of a cell.
    """
    with agent_client.connect() as connection:
        connection.call(SetPolicy(POLICY))
    equality = _measure_equality(start, seconds)
    return Turns(equality, [_measure_cells(start, *pair, count, steps) for pair in PAIRS])


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
def _runner(start: Starts, name: str, user: str) -> Iterator[Side]:
    with _as(user), start(name) as side:
        side.order("train", program=PROGRAM, steps=3)
        yield side


@contextmanager
def _training(side: Side) -> Iterator[None]:
    """Have a program train until the end of the block, without pause for more than a moment."""
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            side.order("train", program=PROGRAM, steps=200)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
            time.sleep(LOOK_SECONDS)
            found = [session(name)["gpu_seconds"] for name in names]
            served = (found[0] - begin[0], found[1] - begin[1])
            apart = max(apart, abs(served[0] - served[1]))
    ended = sum(_preempted(name) for name in names)
    return Equality(seconds, served, apart, ended)


def _preempted(name: str) -> int:
    """Count the turns of a session that were ended for others."""
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


def report(turns: Turns) -> list[str]:
    """Lines of Markdown."""
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
