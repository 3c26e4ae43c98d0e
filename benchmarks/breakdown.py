"""Where the time of a step goes: what client, log and worker have to do for it.

What the client does is the processor time of the notebook's threads, Python and autograd included;
what the worker does, the time in which it executed records. The two overlap, so a step takes about
as long as the longer one, unless it asks for something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.daemon import Side, session


@dataclass(frozen=True)
class Profile:
    """One program on the proxied device; everything is per step.

    Parameters
    ----------
    program : str
    elapsed, client, worker : float
        Milliseconds: of the clock; of processor time in the notebook; of execution.
    operators, records, requests : float
        Operators that were shipped, records of any kind, and those whose answer was awaited.
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


def measure_profile(proxied: Side, program: str, steps: int) -> Profile:
    """Count what some steps take, after as many that are not counted."""
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
