"""Cost of suspending, resuming and migrating, compared with copying the same bytes.

Everything is measured in one run, on the session of one daemon with two software devices, together
with the machine's own copying speed. The daemon gets no requests during a move: they would take a
core from the measured work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.daemon import MIB, DaemonSide, session, verb
from benchmarks.rates import fresh_rate, memcpy_rate
from kernelproxy.common.protocol import MigrateRequest, Resume, Suspend


@dataclass(frozen=True)
class ResumeTimes:
    """Times of a resume, in seconds since the request.

    Parameters
    ----------
    back : float
        Until the request returned.
    first_operator : float
        Until the result of an operator that needs a few bytes.
    loaded : float
        Until the result of operators that need an element of each tensor, so that all are loaded.
    summed : float
        Until the result of operators that read everything.
    """

    back: float
    first_operator: float
    loaded: float
    summed: float


@dataclass(frozen=True)
class MigrationTimes:
    """Seconds of a migration between devices, and seconds without execution."""

    seconds: float
    downtime: float


@dataclass(frozen=True)
class Moves:
    """Speed of moves of a state of `bytes`: medians of `times` moves.

    Parameters
    ----------
    bytes, times : int
    memcpy_gb_per_second, fresh_gb_per_second : float
        Measured just before: between warm buffers, and into memory that must be allocated.
    suspend : float
        Seconds of suspending it when everything has changed.
    resume : Return
    saved, unsaved : Migration
        Of a state that is already in a snapshot, and of one that has just changed completely.
    """

    bytes: int
    times: int
    memcpy_gb_per_second: float
    fresh_gb_per_second: float
    suspend: float
    resume: ResumeTimes
    saved: MigrationTimes
    unsaved: MigrationTimes


def resume(proxied: DaemonSide, name: str, expected: float) -> ResumeTimes:
    """Resume a session, and check its contents.

    Raises
    ------
    RuntimeError
        If its contents differ.
    """
    begin = time.perf_counter()
    verb(Resume(name))
    back = time.perf_counter() - begin
    proxied.order("touch")
    first = time.perf_counter() - begin
    proxied.order("reach")
    loaded = time.perf_counter() - begin
    proxied.order("sum")
    summed = time.perf_counter() - begin
    check(proxied, expected)
    return ResumeTimes(back, first, loaded, summed)


def check(proxied: DaemonSide, expected: float) -> None:
    """Raise RuntimeError if a session's contents have changed."""
    if proxied.order("check")["sum"] != expected:
        raise RuntimeError("a session that moved does not hold what it held")


def measure_moves(proxied: DaemonSide, count: int, times: int) -> Moves:
    """Suspend, resume and migrate a session with `count` bytes, and check its contents."""
    rate, fresh = memcpy_rate(), fresh_rate()
    expected = proxied.order("hold", bytes=count)["sum"]
    proxied.order("touch")
    name = session()["id"]
    suspends: list[float] = []
    returns: list[ResumeTimes] = []
    saved: list[MigrationTimes] = []
    unsaved: list[MigrationTimes] = []
    for _ in range(times):
        proxied.order("rewrite")
        begin = time.perf_counter()
        verb(Suspend(name, "benchmark"))
        suspends.append(time.perf_counter() - begin)
        returns.append(resume(proxied, name, expected))
        # In the state after a regular snapshot: almost nothing has changed since.
        saved.append(_migrate(proxied, name, expected))
        proxied.order("rewrite")
        unsaved.append(_migrate(proxied, name, expected))
    proxied.order("forget")
    return Moves(
        bytes=count,
        times=times,
        memcpy_gb_per_second=rate,
        fresh_gb_per_second=fresh,
        suspend=statistics.median(suspends),
        resume=middle_return(returns),
        saved=_middle(saved),
        unsaved=_middle(unsaved),
    )


def _migrate(proxied: DaemonSide, name: str, expected: float) -> MigrationTimes:
    target = "cpu:0" if session()["device"] == "cpu:1" else "cpu:1"
    found = verb(MigrateRequest(name, target))["migration"]
    check(proxied, expected)
    return MigrationTimes(found["seconds"], found["downtime"])


def _middle(moves: Sequence[MigrationTimes]) -> MigrationTimes:
    return MigrationTimes(
        statistics.median(each.seconds for each in moves),
        statistics.median(each.downtime for each in moves),
    )


def middle_return(returns: Sequence[ResumeTimes]) -> ResumeTimes:
    """Return the median of each figure."""
    return ResumeTimes(
        statistics.median(each.back for each in returns),
        statistics.median(each.first_operator for each in returns),
        statistics.median(each.loaded for each in returns),
        statistics.median(each.summed for each in returns),
    )


def report(moves: Sequence[Moves]) -> list[str]:
    """Return the results as Markdown tables."""
    lines = [
        "Suspending and resuming: medians. All is loaded when an element of each tensor was used,",
        "for which the tensor must be there as a whole.",
        "",
        "| state, MiB | moves | memcpy, GB/s | suspend, s | GB/s | resume: back, ms "
        "| first operator, ms | all loaded, s | GB/s | of memcpy | all summed up, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.bytes / MIB:.0f} | {m.times} | {m.memcpy_gb_per_second:.1f} | {m.suspend:.2f} "
        f"| {_rate(m, m.suspend):.1f} | {m.resume.back * 1e3:.0f} "
        f"| {m.resume.first_operator * 1e3:.0f} | {m.resume.loaded:.2f} "
        f"| {_rate(m, m.resume.loaded):.1f} | {_of_memcpy(m, m.resume.loaded):.0%} "
        f"| {m.resume.summed:.2f} |"
        for m in moves
    ]
    lines += [
        "",
        "Migration: of a state that was saved before, as upkeep does it, and of one of which",
        "everything was written just before. Its copy needs memory that must be allocated, and the",
        "rate of writing to such memory stands beside memcpy's between warm buffers.",
        "",
        "| state, MiB | moves | memcpy, GB/s | to fresh memory, GB/s | state | migrate, s | GB/s "
        "| of memcpy | of fresh memory | stood still, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.bytes / MIB:.0f} | {m.times} | {m.memcpy_gb_per_second:.1f} "
        f"| {m.fresh_gb_per_second:.1f} | {what} | {each.seconds:.2f} "
        f"| {_rate(m, each.seconds):.1f} | {_of_memcpy(m, each.seconds):.0%} "
        f"| {_rate(m, each.seconds) / m.fresh_gb_per_second:.0%} | {each.downtime * 1e3:.0f} |"
        for m in moves
        for what, each in (("saved", m.saved), ("not saved", m.unsaved))
    ]
    return lines


def _rate(moves: Moves, seconds: float) -> float:
    return moves.bytes / seconds / 1e9


def _of_memcpy(moves: Moves, seconds: float) -> float:
    return _rate(moves, seconds) / moves.memcpy_gb_per_second
