"""Two programs on one device: by turns, and at once where that was measured to be better.

A pair that waits for something else half of the time, and one that keeps the device busy. Each
program trains alone first; then both do for a while under a daemon that may not pack them, and
under one that may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from benchmarks.daemon import Side

PROGRAM = "mlp"
NAMES = ("pair-1", "pair-2")
#: Steps after which models are made and caches filled.
WARM_STEPS = 20

Start = Callable[[str], AbstractContextManager[Side]]
#: Starts a daemon with one device, of so many threads; may it pack?
Daemon = Callable[[int, bool], AbstractContextManager[object]]


@dataclass(frozen=True)
class Pair:
    """One pair of equal programs.

    Parameters
    ----------
    program : str
    threads : int
        Of the device.
    alone : float
        Steps per second of one program that has the device for itself.
    turns, packed : float
        Of both together, by turns and where they may share the device, over that: 1 is what a
        device can give that does one thing at a time.
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
        See `Daemon`; the latter starts a runner under a session of that name.
    settle, seconds : float
        Until the scheduler has decided, and for which steps are counted then.
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


def _step(side: Side) -> float:
    """Seconds of a step alone."""
    for _ in range(2):
        moments = side.order("steps", program=PROGRAM, steps=WARM_STEPS)["steps"]
    return float(moments[-1][1] - moments[0][0]) / WARM_STEPS


def _together(
    sides: Sequence[Side], step: float, rest: float, settle: float, seconds: float
) -> float:
    """Steps per second that two programs make at once, of both."""
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
    """Write the figures as a table."""
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
