"""The benchmark runs, with small parameters, and its output is complete."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest

from benchmarks import bench
from benchmarks.execution.operators import Small
from benchmarks.states.moves import ResumeTimes
from benchmarks.states.notebooks import BenchmarkNotebooks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Parts that share their runners, those that run beside no other test, and the others.
TOGETHER = ("programs", "operators", "profile", "snapshots", "moves")
ALONE = ("hostile", "packing", "resizes")
APART = [part for part in bench.PARTS if part not in (*TOGETHER, *ALONE)]

Measure = Callable[..., bench.Results]


@pytest.fixture(scope="module")
def measure() -> Measure:
    """Return a function that measures parts, once; the results of all are one object."""
    results, known = bench.Results(), set[str]()

    def run(*parts: str) -> bench.Results:
        if not known.issuperset(parts):
            found = bench.run(bench.SMALL, ["mlp", "gpt2 generation"], threads=[1], parts=parts)
            empty = bench.Results()
            for each in dataclasses.fields(found):
                value = getattr(found, each.name)
                if value != getattr(empty, each.name):
                    setattr(results, each.name, value)
            known.update(parts)
        return results

    return run


def test_steps_operators_snapshots_and_moves(measure: Measure) -> None:
    results = measure(*TOGETHER)
    assert [row.program for row in results.rows] == ["mlp", "gpt2 generation"]
    for row in results.rows:
        assert row.plain > 0
        assert row.ratio_low <= row.ratio <= row.ratio_high
    _check_small(results.small)
    for profile in results.profiles:
        assert min(profile.elapsed, profile.client, profile.worker, profile.kib) > 0
        assert profile.records >= profile.operators > profile.requests
    (saved,) = results.snapshots
    assert saved.program == "large"
    assert saved.count >= 1
    assert saved.copied > 0
    assert saved.stop > 0
    assert 0 < saved.step <= saved.step_longest
    assert max(saved.step_meanwhile, saved.step_worst_median) <= saved.step_worst
    (moved,) = results.moves
    assert moved.suspend > 0
    _check_return(moved.resume)
    for each in (moved.saved, moved.unsaved):
        assert 0 < each.downtime <= each.seconds


def test_states_on_disk(measure: Measure) -> None:
    (stored,) = measure("disk").disk
    assert min(stored.memcpy, stored.write, stored.read, stored.put) > 0
    _check_return(stored.resume)
    assert stored.written_first > 0.9 * stored.bytes
    assert max(stored.copied_again, stored.written_again) < 0.01 * stored.bytes
    assert stored.written_for_another < 0.02 * stored.bytes


def test_notebooks(measure: Measure) -> None:
    _check_notebooks(measure("notebooks").notebooks)


@pytest.mark.alone  # beside others it takes longer than a test may
def test_pairs_of_programs(measure: Measure) -> None:
    results = measure("packing")
    assert len(results.packing) == 2
    for pair in results.packing:
        assert min(pair.alone, pair.turns, pair.packed) > 0
    assert bench.report(results).count("## Programs that share a device at once") == 1


def test_users_that_share_a_device(measure: Measure) -> None:
    results = measure("turns")
    assert results.turns is not None
    assert min(results.turns.equality.served) > 0
    for cells in results.turns.cells:
        assert len(cells.waits) == bench.SMALL.turns[1]


def test_notebooks_that_start_at_once(measure: Measure) -> None:
    results = measure("crowd")
    assert results.crowd is not None
    assert len(results.crowd.first) == bench.SMALL.crowd[0]
    assert min(results.crowd.waits) > 0


def test_jobs_of_several_ranks(measure: Measure) -> None:
    results = measure("jobs")
    assert tuple((each.ranks, each.devices) for each in results.jobs) == bench.SMALL.jobs[1]
    for each in results.jobs:
        assert min(each.proxied, each.plain, each.of_ideal) > 0
        assert (each.switch > 0) == (each.ranks > each.devices == 1)
        assert (each.spared > 0) == (each.optimizer > 0) == (each.switch > 0)
    assert bench.report(results).count("## Jobs of several ranks") == 1


def test_the_memory_of_a_job(measure: Measure) -> None:
    results = measure("memory")
    assert results.job_memory is not None
    assert 0 < results.job_memory.parameters < results.job_memory.held
    assert bench.report(results).count("## Memory of a job") == 1


@pytest.mark.alone  # beside others it takes longer than a test may
def test_jobs_that_are_resized(measure: Measure) -> None:
    results = measure("resizes")
    assert [(each.before, each.after) for each in results.standstills] == [
        (4, 2), (2, 1), (1, 2), (2, 4),
    ]  # fmt: skip
    assert bench.report(results).count("## Jobs that are resized") == 1


def test_the_first_compilation(measure: Measure) -> None:
    results = measure("compile")
    assert results.compilation is not None
    assert len(results.compilation.plain) == len(results.compilation.proxied) == 1
    assert results.compilation.ratio > 0


def test_the_page_has_all_parts(measure: Measure) -> None:
    measure(*TOGETHER)
    for part in APART:
        results = measure(part)
    page = bench.report(results)
    assert page.count("## First compilation") == 1
    assert page.count("\n| mlp | 1 |") == 1
    assert page.count("\n| mlp | ") == 2  # in total, and its parts
    assert page.count("\n| large | ") == 1
    assert page.count("\n| relu, grad | ") == 1
    # 64 MiB: moved, migrated saved and not, to disk and back, its second snapshot, saved twice
    assert page.count("\n| 64 | ") == 7


@pytest.mark.alone  # its cells have 50 ms
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_cells_are_not_delayed_by_a_hostile_user(measure: Measure) -> None:
    (attack,) = measure("hostile").hostile
    assert attack.count > 0
    assert attack.cells[2] < 0.05


def _check_small(found: Small | None) -> None:
    assert found is not None
    assert len({each.operator for each in found.issues}) >= 10
    for each in found.issues:
        assert min(each.plain, each.proxied, each.ratio) > 0
    assert 0 < found.scalar.median <= found.scalar.high
    assert found.trips["item"] == found.trips["repr"] == 1
    assert set(found.idle_cpu) == {"program", "worker", "daemon"}
    assert min(found.idle_cpu.values()) >= 0


def _check_notebooks(found: BenchmarkNotebooks | None) -> None:
    assert found is not None
    for put in found.puts:
        assert min(put.seconds, put.copying) > 0
    assert found.agains[0].forms == "namespace"
    for again in found.agains:
        assert again.second < 0.02 * again.first
    if found.rest is not None:  # otherwise there is no CRIU
        assert found.rest.held > found.rest.bytes
        assert len(found.rest.answers) == len(found.puts)


def _check_return(found: ResumeTimes) -> None:
    assert 0 < found.back <= found.first_operator <= found.loaded <= found.summed
