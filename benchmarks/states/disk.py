"""Cost of states on disk: time compared with the disk's own rates, and space."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.daemon import MIB, NAME, ORDER_SECONDS, SECOND_NAME, DaemonSide, session, verb
from benchmarks.rates import disk_rates, memcpy_rate
from benchmarks.states.moves import ResumeTimes, middle_return, resume
from kernelproxy.common.protocol import Resume, Suspend

#: Seconds between two checks whether a state is on disk.
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Disk:
    """Spill and resume of a state of `bytes`: medians of `times` runs.

    Parameters
    ----------
    bytes, times : int
    memcpy, write, read : float
        Rates of this machine in the same run, in GB/s: copying in memory by one thread, and
        direct transfers to and from the disk by several threads.
    put : float
        Seconds from the end of the suspension until the state is only on disk.
    resume : Return
    copied_again : int
        Bytes that the second snapshot copies after some inference.
    written_again : int
        Bytes that are written to disk for this snapshot.
    written_first, written_for_another : int
        Bytes that are written for the state, and then for another session with the same weights.
    """

    bytes: int
    times: int
    memcpy: float
    write: float
    read: float
    put: float
    resume: ResumeTimes
    copied_again: int
    written_again: int
    written_first: int
    written_for_another: int


class DaemonStore:
    """The daemon's chunk store, as seen from outside.

    Parameters
    ----------
    directory : Path
        ``JUPYTER_SING_DATA_DIR``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: set[str] = set()

    def written(self) -> int:
        """Return the bytes of the chunks that are new since the last call."""
        found = {
            each.name: each.stat().st_size for each in self.directory.glob("states/chunks/*/*")
        }
        new = sum(count for name, count in found.items() if name not in self._known)
        self._known = set(found)
        return new


def _put(name: str) -> tuple[float, int]:
    """Suspend a session; return the seconds until it is spilled, and the bytes copied before."""
    copied = verb(Suspend(session(name)["id"], "benchmark"))["snapshot"]["copied"]
    begin = time.perf_counter()
    while session(name)["tier"] != "cold":
        if time.perf_counter() - begin > ORDER_SECONDS:
            raise RuntimeError("a state did not come to disk")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - begin, int(copied)


def measure_disk(
    one: DaemonSide, other: DaemonSide, directory: Path, count: int, times: int
) -> Disk:
    """Spill and resume states of `count` bytes, and check their contents.

    The daemon must spill suspended states at once.

    Parameters
    ----------
    one, other : Side
        Programs of the sessions `NAME` and `SECOND_NAME`.
    directory : Path
        ``JUPYTER_SING_DATA_DIR``.
    count, times : int

    Raises
    ------
    RuntimeError
        If the resumed state differs.
    """
    memcpy, store = memcpy_rate(), DaemonStore(directory)
    rates: list[tuple[float, float]] = []
    puts: list[float] = []
    firsts: list[int] = []
    returns: list[ResumeTimes] = []
    agains: list[tuple[int, int]] = []
    one.order("touch")  # it has begun, and has its session
    name = session(NAME)["id"]
    for seed in range(times):  # other bytes each time: the store already has the earlier ones
        expected = one.order("hold", bytes=count, seed=seed)["sum"]
        one.order("touch")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        rates.append(disk_rates(directory, count))
        puts.append(_put(NAME)[0])
        firsts.append(store.written())
        returns.append(resume(one, name, expected))
        _, copied = _put(NAME)
        agains.append((copied, store.written()))
        verb(Resume(name))  # a session that was suspended on request does not resume by itself
    other.order("hold", bytes=count, seed=times - 1)
    _put(SECOND_NAME)
    verb(Resume(session(SECOND_NAME)["id"]))
    for side in (one, other):
        side.order("forget")
    return Disk(
        bytes=count,
        times=times,
        memcpy=memcpy,
        write=statistics.median(write for write, _ in rates),
        read=statistics.median(read for _, read in rates),
        put=statistics.median(puts),
        resume=middle_return(returns),
        copied_again=int(statistics.median(copied for copied, _ in agains)),
        written_again=int(statistics.median(written for _, written in agains)),
        written_first=int(statistics.median(firsts)),
        written_for_another=store.written(),
    )


def report(disks: Sequence[Disk]) -> list[str]:
    """Return the results as Markdown tables."""
    lines = [
        "To disk and back: medians, beside direct transfers of as many bytes by as many threads.",
        "",
        "| state, MiB | moves | memcpy, GB/s | disk writes, GB/s | put, s | GB/s | of the disk "
        "| disk reads, GB/s | first operator, ms | all loaded, s | GB/s | of the disk |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {d.bytes / MIB:.0f} | {d.times} | {d.memcpy:.1f} | {d.write:.2f} | {d.put:.2f} "
        f"| {d.bytes / d.put / 1e9:.2f} | {d.bytes / d.put / 1e9 / d.write:.0%} | {d.read:.2f} "
        f"| {d.resume.first_operator * 1e3:.0f} | {d.resume.loaded:.2f} "
        f"| {d.bytes / d.resume.loaded / 1e9:.2f} "
        f"| {d.bytes / d.resume.loaded / 1e9 / d.read:.0%} |"
        for d in disks
    ]
    lines += [
        "",
        "Inference: what the second snapshot of the same weights copies and writes to disk, and",
        "what is written for the same weights of another session.",
        "",
        "| state, MiB | written at first, MiB | second snapshot copies | second time on disk "
        "| another session |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {d.bytes / MIB:.0f} | {d.written_first / MIB:.0f} | {d.copied_again / d.bytes:.3%} "
        f"| {d.written_again / d.bytes:.3%} | {d.written_for_another / d.bytes:.3%} |"
        for d in disks
    ]
    return lines
