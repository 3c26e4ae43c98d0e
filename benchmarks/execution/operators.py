"""Cost of small operations: issuing an operator, reading a number, printing, and being idle.

A program of small operators is as fast as it can issue them, so the issue time is compared with
plain torch, as for whole programs. Operators are issued in bursts that fit into the log. The
worker's execution time is not counted: it overlaps, and the next burst begins when it has ended.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.daemon import DaemonSide, session

#: Number of operators in one burst.
BURST = 1000


@dataclass(frozen=True)
class Issue:
    """One operator on tensors of 16 elements; microseconds until the call returns.

    Parameters
    ----------
    operator : str
    plain, proxied : float
        Medians of the bursts.
    ratio : float
        Median of the bursts' ratios.
    """

    operator: str
    plain: float
    proxied: float
    ratio: float


@dataclass(frozen=True)
class ScalarReads:
    """Microseconds to read a number from the device, while the worker is awake.

    Parameters
    ----------
    count : int
        Number of reads, one after the other.
    median, high : float
        The median, and the 99th percentile.
    computed : float
        The median if the number is first computed by one operator.
    """

    count: int
    median: float
    high: float
    computed: float


@dataclass(frozen=True)
class Small:
    """All results of this benchmark.

    Parameters
    ----------
    issues : list of Issue
    scalar : Scalar
    trips : dict of str to float
        Number of round trips for each operation.
    idle_seconds : float
        Length of the idle time.
    idle_cpu : dict of str to float
        Seconds of CPU time that each process used meanwhile.
    """

    issues: list[Issue]
    scalar: ScalarReads
    trips: dict[str, float]
    idle_seconds: float
    idle_cpu: dict[str, float]


def measure_small(
    plain: DaemonSide, proxied: DaemonSide, rounds: int, scalars: int, idle_seconds: float
) -> Small:
    """Measure everything; where both sides are measured, they take turns.

    Parameters
    ----------
    plain, proxied
    rounds : int
        Number of bursts for each operator.
    scalars : int
        Number of reads.
    idle_seconds : float
        Length of the idle time.
    """
    issues = []
    for name in proxied.order("operators")["operators"]:
        times: dict[DaemonSide, list[float]] = {plain: [], proxied: []}
        for index in range(-1, rounds):  # one more, which is not counted
            for side in (plain, proxied) if index % 2 else (proxied, plain):
                seconds = side.order("issue", operator=name, count=BURST)["seconds"]
                if index >= 0:
                    times[side].append(seconds / BURST * 1e6)
        ratios = [b / a for a, b in zip(times[plain], times[proxied], strict=True)]
        issues.append(
            Issue(
                name,
                statistics.median(times[plain]),
                statistics.median(times[proxied]),
                statistics.median(ratios),
            )
        )
    found = proxied.order("scalars", count=scalars)
    trips = proxied.order("trips")
    return Small(
        issues=issues,
        scalar=ScalarReads(scalars, found["median"], found["high"], found["computed"]),
        trips=trips,
        idle_seconds=idle_seconds,
        idle_cpu=measure_idle(proxied, idle_seconds),
    )


def measure_idle(proxied: DaemonSide, seconds: float) -> dict[str, float]:
    """Return CPU seconds of program, worker and the daemon's processes between two cells."""
    proxied.order("touch")
    proxied.order("cell", change=-1)
    worker = int(session()["worker_pid"])
    pids = {"program": int(proxied.order("pid")["pid"]), "worker": worker}
    pids |= {f"daemon ({pid})": pid for pid in daemon_pids(worker)}
    time.sleep(1.0)  # until the previous work has ended
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    proxied.order("cell", change=1)
    burnt: dict[str, float] = {"program": 0.0, "worker": 0.0, "daemon": 0.0}
    for name, pid in pids.items():
        burnt[name.split(" ")[0]] += cpu_seconds(pid) - before[name]
    return burnt


def daemon_pids(worker: int) -> list[int]:
    """Return the processes of a worker's daemon, except the worker itself."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):  # no process, or one that has just ended
            parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    top = worker
    while (above := parents[top]) > 1 and "kernelproxy" in _command(above):
        top = above
    family = {top}
    while grown := {pid for pid, above in parents.items() if above in family} - family:
        family |= grown
    return sorted(family - {worker})


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text("utf-8")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, including all its threads."""
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on; the second may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()


def report(small: Small) -> list[str]:
    """Return the figures as tables."""
    lines = [
        "What it takes to issue an operator on tensors of 16 elements, in microseconds, in bursts",
        f"of {BURST}.",
        "",
        "| operator | plain | proxied | ratio |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {each.operator} | {each.plain:.2f} | {each.proxied:.2f} | **{each.ratio:.2f}** |"
        for each in small.issues
    ]
    ratio = statistics.median(each.ratio for each in small.issues)
    sums = [sum(getattr(each, side) for each in small.issues) for side in ("plain", "proxied")]
    lines += [
        f"| *all of them* | {sums[0]:.2f} | {sums[1]:.2f} | **{ratio:.2f}** (median) |",
        "",
        f"A number is read back in **{small.scalar.median:.1f} µs** (median of "
        f"{small.scalar.count}; 99 % are below {small.scalar.high:.1f} µs) while the worker is "
        f"awake, and in {small.scalar.computed:.1f} µs where an operator computes it first.",
        "",
        "Round trips to the worker:",
        "",
        "| of | round trips |",
        "|---|---|",
    ]
    lines += [f"| {name} | {count:g} |" for name, count in small.trips.items()]
    burnt = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in small.idle_cpu.items())
    lines += ["", f"CPU time in {small.idle_seconds:.0f} s in which nothing was done: {burnt}."]
    return lines
