"""Notebooks that start at once on two devices, which have half the memory that eight of them need.

Each is a process of its own under a session: it fills its part of the memory in its first cell, and
then runs short cells with pauses, as people do. Measured is the time from a cell's first operator
to its result, which is *time to the device*: the operator itself takes microseconds.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.daemon import MIB, Side

DEVICES = 2
DEVICE_BYTES = 256 * MIB
#: Of a notebook; with what its programs need, all have twice what the devices have.
HELD_BYTES = 112 * MIB
PROGRAM = "mlp"
STEPS = (2, 5, 20)
THINK_SECONDS = (0.1, 0.4, 1.0, 2.5)

Start = Callable[[str], AbstractContextManager[Side]]


@dataclass(frozen=True)
class Crowd:
    """What they met.

    Parameters
    ----------
    seconds : float
        Since the first operator of any of them, for which cells were begun.
    first : list of float
        Seconds to the device of each notebook's first cell, in order of size.
    waits : list of float
        The same of all cells, the first ones among them.
    """

    seconds: float
    first: list[float]
    waits: list[float]

    def quantile(self, part: float) -> float:
        """The least wait that so large a part of all cells does not exceed."""
        return self.waits[min(len(self.waits) - 1, int(part * len(self.waits)))]


def devices() -> str:
    """The devices, as `JUPYTER_SING_DEVICES` names them."""
    return ",".join([f"cpu:{DEVICE_BYTES // MIB}MiB@1"] * DEVICES)


def measure_crowd(start: Start, notebooks: int, seconds: float) -> Crowd:
    """Measure under the daemon that the environment names.

    Parameters
    ----------
    start : callable
        Starts a runner under a session of a name.
    notebooks : int
        How many there are.
    seconds : float
        How long cells are begun after the first operator of any of them.

    Raises
    ------
    RuntimeError
        A notebook ended, as without memory.
    """
    found: list[list[float]] = [[] for _ in range(notebooks)]
    begun = threading.Event()
    until = [0.0]
    failures: list[BaseException] = []

    def use(number: int) -> None:
        dice = random.Random(number)  # the same cells and pauses in each run
        try:
            with start(f"crowd-{number}") as side:
                side.order("pid")  # it is up; from now on there is nothing but cells
                if not begun.is_set():
                    until[0] = time.monotonic() + seconds
                    begun.set()
                while time.monotonic() < until[0]:
                    side.order("cell", change=1)
                    found[number].append(side.order("touch")["seconds"])
                    if len(found[number]) == 1:
                        side.order("hold", bytes=HELD_BYTES, seed=number)
                    side.order("train", program=PROGRAM, steps=dice.choice(STEPS))
                    side.order("cell", change=-1)
                    time.sleep(dice.choice(THINK_SECONDS))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(notebooks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise RuntimeError(f"{len(failures)} of {notebooks} notebooks failed") from failures[0]
    first = sorted(waits[0] for waits in found if waits)
    return Crowd(seconds, first, sorted(wait for waits in found for wait in waits))


def report(crowd: Crowd) -> list[str]:
    """Lines of Markdown."""
    first, waits = crowd.first, crowd.waits
    return [
        f"{len(first)} notebooks start at once on {DEVICES} devices with half the memory that they",
        f"need, and run cells for {crowd.seconds:.0f} s. Time from a cell's first operator to its",
        "result, in ms:",
        "",
        "| cells | count | p50 | p99 | worst |",
        "|---|---|---|---|---|",
        f"| all | {len(waits)} | {crowd.quantile(0.5) * 1e3:.1f} "
        f"| **{crowd.quantile(0.99) * 1e3:.0f}** | {waits[-1] * 1e3:.0f} |",
        f"| the first of each notebook | {len(first)} | {first[len(first) // 2] * 1e3:.0f} "
        f"|  | {first[-1] * 1e3:.0f} |",
    ]
