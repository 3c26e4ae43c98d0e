"""Breakdown of a step's time: the work of client, log and worker.

The client's part is the CPU time of the notebook's threads, including Python and autograd; the
worker's part is the time in which it executed records. The two overlap, so a step takes about as
long as the longer one, unless it makes requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.daemon import DaemonSide, session


@dataclass(frozen=True)
class Profile:
    """One program on the proxied device; everything is per step.

    Parameters
    ----------
    program : str
    elapsed, client, worker : float
        Milliseconds: wall-clock time; CPU time of the notebook; execution time.
    operators, records, requests : float
        Operators sent to the worker, records of any kind, and requests.
    misses : float
        Operators whose results' geometry was not in the cache.
    kib : float
        KiB of log.
    """

    program: str
    elapsed: float
    client: float
    worker: float
    operators: float
    records: float
    requests: float
    misses: float
    kib: float


def measure_profile(proxied: DaemonSide, program: str, steps: int) -> Profile:
    """Measure some steps, after the same number of warm-up steps."""
    proxied.order("train", program=program, steps=steps)
    before = session()["gpu_seconds"]
    found = proxied.order("count", program=program, steps=steps)
    executed = session()["gpu_seconds"] - before
    proxied.order("forget")
    return Profile(
        program=program,
        elapsed=found["seconds"] / steps * 1e3,
        client=found["cpu_seconds"] / steps * 1e3,
        worker=executed / steps * 1e3,
        operators=found["operators"] / steps,
        records=found["records"] / steps,
        requests=found["requests"] / steps,
        misses=found["cache_misses"] / steps,
        kib=found["bytes"] / steps / 1024,
    )


def report(profiles: Sequence[Profile]) -> list[str]:
    """Write the figures as a table."""
    return [
        "A step with one compute thread, and what it is made of: processor time of the notebook's",
        "threads, time in which the worker executed, and what went through the log.",
        "",
        "| program | ms | client, ms | worker, ms | operators | records | log, KiB | round trips "
        "| new geometries |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {each.program} | {each.elapsed:.2f} | {each.client:.2f} | {each.worker:.2f} "
            f"| {each.operators:.0f} | {each.records:.0f} | {each.kib:.1f} | {each.requests:.1f} "
            f"| {each.misses:.1f} |"
            for each in profiles
        ),
    ]
