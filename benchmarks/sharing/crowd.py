"""Notebooks that start at the same time on two devices with half the memory that eight need.

Each is a process of its own under a session: it fills its part of the memory in its first cell, and
then runs short cells with pauses, as users do. The measured value is the time from a cell's first
operator to its result, the *time to the device*: the operator itself takes microseconds.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.daemon import MIB, DaemonSide

DEVICES = 2
DEVICE_BYTES = 256 * MIB
#: Bytes of one notebook. Including the programs' memory, all need twice what the devices have.
HELD_BYTES = 112 * MIB
PROGRAM = "mlp"
STEPS = (2, 5, 20)
THINK_SECONDS = (0.1, 0.4, 1.0, 2.5)

Start = Callable[[str], AbstractContextManager[DaemonSide]]


@dataclass(frozen=True)
class Crowd:
    """Measured waits of the notebooks.

    Parameters
    ----------
    seconds : float
        Time since the first operator of any notebook in which cells were begun.
    first : list of float
        Seconds to the device of each notebook's first cell, in order of size.
    waits : list of float
        The same for all cells, including the first ones.
    """

    seconds: float
    first: list[float]
    waits: list[float]

    def quantile(self, part: float) -> float:
        """Return a quantile of the waits: this part of all cells waits at most that long."""
        return self.waits[min(len(self.waits) - 1, int(part * len(self.waits)))]


def devices() -> str:
    """Return the devices in the format of `JUPYTER_SING_DEVICES`."""
    return ",".join([f"cpu:{DEVICE_BYTES // MIB}MiB@1"] * DEVICES)


def measure_crowd(start: Start, notebooks: int, seconds: float) -> Crowd:
    """Measure under the daemon given by the environment.

    Parameters
    ----------
    start : callable
        Starts a runner under a named session.
    notebooks : int
        Number of notebooks.
    seconds : float
        Time after the first operator of any notebook in which cells are begun.

    Raises
    ------
    RuntimeError
        A notebook ended, for example for lack of memory.
    """
    found: list[list[float]] = [[] for _ in range(notebooks)]
    begun = threading.Event()
    until = [0.0]
    failures: list[BaseException] = []

    def use(number: int) -> None:
        dice = random.Random(number)  # the same cells and pauses in each run
        try:
            with start(f"crowd-{number}") as side:
                side.order("pid")  # it has started; from now on it only runs cells
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
    """Return the result as lines of Markdown."""
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
