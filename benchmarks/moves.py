"""What snapshots, resuming and migration cost: measured against copying the same bytes.

`benchmarks.bench` runs this after its own rows. Everything is measured in one run, on the sessions
of one daemon with two software devices, beside the machine's own copying speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from kernelproxy import control
from kernelproxy.protocol import Migrate, Resume, SessionReply, Status, StatusReply, Suspend

MIB = 1 << 20
ORDER_SECONDS = 600.0
#: Batches of steps until the daemon has taken a snapshot by itself.
BATCHES_MAX = 60


class Side(Protocol):
    """A runner that takes orders."""

    def order(self, do: str, **arguments: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Snapshots:
    """A snapshot beside the execution, and one with the gate closed, of one program.

    Times in milliseconds.

    Parameters
    ----------
    program : str
    bytes, copied : int
        Of the snapshot beside the execution.
    stop : float
        Copying everything with the gate closed.
    stalled : float
        Time for which the snapshot beside the execution kept the log from being executed.
    step, step_meanwhile, step_worst : float
        Medians of the steps before and during the snapshot, and the longest during it.
    """

    program: str
    bytes: int
    copied: int
    stop: float
    stalled: float
    step: float
    step_meanwhile: float
    step_worst: float


@dataclass(frozen=True)
class Moves:
    """How fast a state of `bytes` moves; seconds."""

    bytes: int
    suspend: float
    resume: float
    first_operator: float
    migration: float
    downtime: float


def session() -> dict[str, Any]:
    """Ask the daemon for the session of the benchmark."""
    with control.connect(start=False) as connection:
        reply = connection.expect(StatusReply, Status())
    (found,) = (each for each in reply.sessions if each["name"] == "bench")
    return dict(found)


def verb(request: Any) -> dict[str, Any]:
    """Have the daemon do something with a session."""
    with control.connect(start=False) as connection:
        return connection.expect(SessionReply, request, ORDER_SECONDS).session


def measure_snapshots(proxied: Side, program: str) -> Snapshots:
    """Train until the daemon takes a snapshot, and compare the steps before and during it.

    Raises
    ------
    RuntimeError
        If it takes none.
    """
    proxied.order("steps", program=program, steps=3)
    once = proxied.order("steps", program=program, steps=3)["steps"]
    batch = max(3, round(1.0 / statistics.mean(end - begin for begin, end in once)))
    verb(Suspend(session()["id"], "benchmark"))
    stopped = session()["snapshot"]
    verb(Resume(session()["id"]))
    before = stopped["position"]
    steps: list[Sequence[float]] = []
    for _ in range(BATCHES_MAX):
        steps += proxied.order("steps", program=program, steps=batch)["steps"]
        found = session()["snapshot"]
        if found["position"] != before and len(steps) > 2 * batch:
            break
        before = found["position"] if len(steps) <= 2 * batch else before
    else:
        raise RuntimeError("the daemon took no snapshot")
    age = time.time() - datetime.fromisoformat(found["taken"]).timestamp()
    end = time.monotonic() - age
    begin = end - found["seconds"]
    meanwhile = [b - a for a, b in steps if b > begin and a < end]
    others = [b - a for a, b in steps[3:] if b <= begin or a >= end]
    proxied.order("forget")
    return Snapshots(
        program=program,
        bytes=found["bytes"],
        copied=found["copied"],
        stop=stopped["seconds"] * 1e3,
        stalled=found["stalled"] * 1e3,
        step=statistics.median(others) * 1e3,
        step_meanwhile=statistics.median(meanwhile) * 1e3,
        step_worst=max(meanwhile) * 1e3,
    )


def measure_moves(proxied: Side, count: int, times: int) -> Moves:
    """Suspend, resume and migrate a session that holds `count` bytes, and check what it holds."""
    expected = proxied.order("hold", bytes=count)["sum"]
    proxied.order("touch")
    name, figures = session()["id"], []
    for index in range(times):
        begin = time.perf_counter()
        verb(Suspend(name, "benchmark"))
        suspended = time.perf_counter()
        verb(Resume(name))
        proxied.order("touch")
        first = time.perf_counter() - suspended
        if proxied.order("check")["sum"] != expected:
            raise RuntimeError("a resumed session does not hold what it held")
        verb(Suspend(name, "benchmark"))
        resuming = time.perf_counter()
        verb(Resume(name))
        while session()["loading"]:
            pass
        resumed = time.perf_counter()
        if proxied.order("check")["sum"] != expected:
            raise RuntimeError("a resumed session does not hold what it held")
        moved = verb(Migrate(name, f"cpu:{1 - index % 2}"))["migration"]
        if proxied.order("check")["sum"] != expected:
            raise RuntimeError("a migrated session does not hold what it held")
        figures.append(
            (suspended - begin, resumed - resuming, first, moved["seconds"], moved["downtime"])
        )
    proxied.order("forget")
    middle = [statistics.median(each) for each in zip(*figures, strict=True)]
    return Moves(count, *middle)


def report(snapshots: Sequence[Snapshots], moves: Sequence[Moves]) -> list[str]:
    """Write both as tables of Markdown."""
    lines = [
        "| program | state, MiB | copied, MiB | stop and copy, ms | stalled, ms | step, ms "
        "| step meanwhile | longest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.program} | {s.bytes / MIB:.0f} | {s.copied / MIB:.0f} | {s.stop:.0f} "
        f"| {s.stalled:.1f} | {s.step:.0f} | {s.step_meanwhile / s.step:.2f} "
        f"| {s.step_worst / s.step:.2f} |"
        for s in snapshots
    ]
    lines += [
        "",
        "| state, MiB | suspend, s | resume, s | GB/s | first operator, ms | migrate, s "
        "| stood still, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.bytes / MIB:.0f} | {m.suspend:.2f} | {m.resume:.2f} "
        f"| {m.bytes / m.resume / 1e9:.1f} | {m.first_operator * 1e3:.0f} | {m.migration:.2f} "
        f"| {m.downtime * 1e3:.0f} |"
        for m in moves
    ]
    return lines
