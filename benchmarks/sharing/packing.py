"""Two programs on one device: in turns, and packed if that was measured to be faster.

One pair of programs is idle half of the time, and one pair keeps the device busy. Each program
first trains alone; then both train for a while under a daemon that must not pack them, and under
one that may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from benchmarks.daemon import DaemonSide

PROGRAM = "mlp"
NAMES = ("pair-1", "pair-2")
#: Warm-up steps, after which models are made and caches are filled.
WARM_STEPS = 20

Start = Callable[[str], AbstractContextManager[DaemonSide]]
#: Starts a daemon with one device; arguments: its number of threads, and whether it may pack.
Daemon = Callable[[int, bool], AbstractContextManager[object]]


@dataclass(frozen=True)
class Pair:
    """One pair of equal programs.

    Parameters
    ----------
    program : str
    threads : int
        Number of threads of the device.
    alone : float
        Steps per second of one program alone on the device.
    turns, packed : float
        Steps per second of both together, in turns and packed, divided by `alone`: 1 is the
        most for a device that executes one program at a time.
    """

    program: str
    threads: int
    alone: float
    turns: float
    packed: float


def measure_packing(daemon: Daemon, start: Start, settle: float, seconds: float) -> list[Pair]:
    """Measure both pairs.

    Parameters
    ----------
    daemon, start
        See `Daemon`; `start` starts a runner under a session of that name.
    settle, seconds : float
        Time until the scheduler has decided, and time in which steps are then counted.
    """
    pairs = []
    for what, threads, wait in (("waits half of the time", 1, None), ("keeps it busy", 2, 0.0)):
        alone, together = 0.0, []
        for packing in (False, True):
            with daemon(threads, packing), ExitStack() as stack:
                sides = [stack.enter_context(start(name)) for name in NAMES]
                step = _step(sides[0])
                _step(sides[1])
                rest = step if wait is None else wait
                if not packing:
                    alone = 1.0 / (step + rest)
                together.append(_together(sides, step + rest, rest, settle, seconds))
        pairs.append(Pair(f"{PROGRAM}, {what}", threads, alone, *(x / alone for x in together)))
    return pairs


def _step(side: DaemonSide) -> float:
    """Return the seconds of one step without competition."""
    for _ in range(2):
        moments = side.order("steps", program=PROGRAM, steps=WARM_STEPS)["steps"]
    return float(moments[-1][1] - moments[0][0]) / WARM_STEPS


def _together(
    sides: Sequence[DaemonSide], step: float, rest: float, settle: float, seconds: float
) -> float:
    """Return the steps per second of two concurrent programs, both together."""
    steps = int(1.5 * (settle + seconds) / step)
    ends: list[list[float]] = [[], []]

    def train(number: int) -> None:
        order = {"program": PROGRAM, "steps": steps, "wait": rest}
        moments = sides[number].order("steps", **order)["steps"]
        ends[number] = [end for _, end in moments]

    begin = time.monotonic() + settle
    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    end = min(begin + seconds, *(each[-1] for each in ends))
    counted = sum(sum(begin <= at <= end for at in each) for each in ends)
    return counted / (end - begin)


def report(pairs: Sequence[Pair]) -> list[str]:
    """Return the figures as a table."""
    return [
        "Two equal programs on one device, each step waited for. Progress of both together, where",
        "1 is that of one which has the device for itself:",
        "",
        "| each program | threads | alone, steps/s | by turns | may share the device |",
        "|---|---|---|---|---|",
        *(
            f"| {each.program} | {each.threads} | {each.alone:.0f} | {each.turns:.2f} "
            f"| **{each.packed:.2f}** |"
            for each in pairs
        ),
    ]
