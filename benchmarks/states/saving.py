"""Cost of snapshots for the steps of a program: during execution, and with the gate closed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.daemon import MIB, DaemonSide, session, verb
from kernelproxy.common.protocol import Resume, Suspend

#: Maximum number of batches of steps until the daemon has taken a snapshot by itself.
BATCHES_MAX = 60
STOPS = 3


@dataclass(frozen=True)
class Snapshots:
    """Snapshots of one program during its execution, and others with the gate closed.

    Times in milliseconds.

    Parameters
    ----------
    program : str
    count : int
        Number of snapshots during execution.
    bytes, copied : int
        Median per snapshot.
    stop : float
        Copying everything with the gate closed; the median.
    stalled : float
        Time for which a snapshot stopped the execution of the log; the median.
    stalled_worst : float
        The longest of these.
    step, step_longest : float
        Median and longest of the steps without a snapshot.
    step_meanwhile : float
        Median of the steps during all snapshots.
    step_worst_median, step_worst : float
        The longest step during a snapshot: the median of the snapshots, and the worst of them.
    step_otherwise : float
        The longest step in a period without a snapshot, of a snapshot's length: the median.
    """

    program: str
    count: int
    bytes: int
    copied: int
    stop: float
    stalled: float
    stalled_worst: float
    step: float
    step_longest: float
    step_meanwhile: float
    step_worst_median: float
    step_worst: float
    step_otherwise: float

    @property
    def worst_pause(self) -> float:
        """Extra time of the longest step, as a fraction of the time to stop and copy."""
        return (self.step_worst - self.step) / self.stop

    @property
    def pause(self) -> float:
        """The same for the median snapshot."""
        return (self.step_worst_median - self.step) / self.stop

    @property
    def pause_otherwise(self) -> float:
        """The same without a snapshot: the usual variation of steps in a period of that length."""
        return (self.step_otherwise - self.step) / self.stop

    @property
    def worst_pause_otherwise(self) -> float:
        """The same for the longest of all steps without a snapshot: the reference for the worst."""
        return (self.step_longest - self.step) / self.stop


@dataclass(frozen=True)
class Window:
    """Time of a snapshot, in seconds of the monotonic clock, and its own report."""

    begin: float
    end: float
    said: dict[str, Any]

    def has(self, step: Sequence[float]) -> bool:
        """Return whether a step overlaps the snapshot."""
        return step[1] > self.begin and step[0] < self.end


def _window(said: dict[str, Any]) -> Window:
    age = time.time() - datetime.fromisoformat(said["taken"]).timestamp()
    end = time.monotonic() - age
    return Window(end - said["seconds"], end, said)


def _apart(step: Sequence[float], windows: Sequence[Window]) -> bool:
    """Return whether a step overlaps no snapshot."""
    return not any(each.has(step) for each in windows)


def _stop(proxied: DaemonSide) -> float:
    """Return the seconds for saving all state while nothing is executed."""
    proxied.order("rewrite")  # so that all of it has to be saved again
    name = session()["id"]
    found = verb(Suspend(name, "benchmark"))["snapshot"]
    verb(Resume(name))
    return float(found["seconds"])


def measure_snapshots(proxied: DaemonSide, program: str, count: int) -> Snapshots:
    """Train until the daemon has taken `count` snapshots, and compare the steps meanwhile.

    Raises
    ------
    RuntimeError
        If it takes too few.
    """
    proxied.order("steps", program=program, steps=3)
    stop = statistics.median(_stop(proxied) for _ in range(STOPS))
    once = proxied.order("steps", program=program, steps=6)["steps"][3:]
    batch = max(3, round(1.0 / statistics.mean(end - begin for begin, end in once)))
    proxied.order("steps", program=program, steps=batch)  # all of it is there again
    seen = session()["snapshot"]["position"]
    steps: list[Sequence[float]] = []
    windows: list[Window] = []
    for _ in range(count * BATCHES_MAX):
        steps += proxied.order("steps", program=program, steps=batch)["steps"]
        said = session()["snapshot"]
        if said["position"] != seen:
            seen, window = said["position"], _window(said)
            if any(window.has(step) for step in steps):  # and not between two batches
                windows.append(window)
        if len(windows) >= count and any(_apart(step, windows) for step in steps):
            break
    else:
        raise RuntimeError("the daemon took too few snapshots")
    proxied.order("forget")
    return _compare(program, stop, steps, windows)


def _longest_otherwise(
    steps: Sequence[Sequence[float]], windows: Sequence[Window]
) -> Iterator[float]:
    """Return the longest step of each period without a snapshot, each of a snapshot's length."""
    length = statistics.median(each.end - each.begin for each in windows)
    begin, end = steps[0][0], steps[-1][1]
    while begin + length <= end:
        stretch = Window(begin, begin + length, {})
        inside = [step for step in steps if stretch.has(step)]
        if inside and all(_apart(step, windows) for step in inside):
            yield max(b - a for a, b in inside)
        begin += length


def _compare(
    program: str, stop: float, steps: Sequence[Sequence[float]], windows: Sequence[Window]
) -> Snapshots:
    meanwhile = [[b - a for a, b in steps if each.has((a, b))] for each in windows]
    others = [b - a for a, b in steps if _apart((a, b), windows)]
    longest = [max(each) for each in meanwhile]
    stalled = [each.said["stalled"] for each in windows]
    return Snapshots(
        program=program,
        count=len(windows),
        bytes=int(statistics.median(each.said["bytes"] for each in windows)),
        copied=int(statistics.median(each.said["copied"] for each in windows)),
        stop=stop * 1e3,
        stalled=statistics.median(stalled) * 1e3,
        stalled_worst=max(stalled) * 1e3,
        step=statistics.median(others) * 1e3,
        step_longest=max(others) * 1e3,
        step_meanwhile=statistics.median(itertools.chain(*meanwhile)) * 1e3,
        step_worst_median=statistics.median(longest) * 1e3,
        step_worst=max(longest) * 1e3,
        step_otherwise=statistics.median(list(_longest_otherwise(steps, windows)) or [max(others)])
        * 1e3,
    )


def report(snapshots: Sequence[Snapshots]) -> list[str]:
    """Return the results as a Markdown table."""
    lines = [
        "Snapshots beside the execution: steps are relative to the median of those without one. A",
        "pause is what the longest step during a snapshot took longer than that, as a part of",
        "stopping and copying everything: of the median snapshot, and of the worst. Beside it",
        "stands the same of as long stretches without a snapshot, and of the longest step without",
        "one in this run: steps differ anyway.",
        "",
        "| program | state, MiB | snapshots | copied, MiB | stop and copy, ms "
        "| stalled, ms (worst) | step, ms | longest otherwise | step meanwhile "
        "| longest meanwhile (worst) | pause | worst pause | without a snapshot (worst) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.program} | {s.bytes / MIB:.0f} | {s.count} | {s.copied / MIB:.0f} | {s.stop:.0f} "
        f"| {s.stalled:.1f} ({s.stalled_worst:.1f}) | {s.step:.0f} "
        f"| {s.step_longest / s.step:.2f} | {s.step_meanwhile / s.step:.2f} "
        f"| {s.step_worst_median / s.step:.2f} ({s.step_worst / s.step:.2f}) "
        f"| **{s.pause:.1%}** | **{s.worst_pause:.1%}** "
        f"| {s.pause_otherwise:.1%} ({s.worst_pause_otherwise:.1%}) |"
        for s in snapshots
    ]
    return lines
