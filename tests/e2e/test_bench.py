"""The benchmark runs, small, and what it writes is complete."""

from __future__ import annotations

import pytest

from benchmarks import bench


@pytest.mark.e2e
@pytest.mark.slow
def test_small_benchmark_measures_both_sides_snapshots_and_moves() -> None:
    results = bench.run(bench.SMALL, ["mlp", "gpt2 generation"], threads=[1])
    assert [row.program for row in results.rows] == ["mlp", "gpt2 generation"]
    for row in results.rows:
        assert row.plain > 0
        assert row.ratio_low <= row.ratio <= row.ratio_high
    (saved,) = results.snapshots
    assert saved.program == "large"
    assert saved.copied > 0
    assert 0 < saved.step <= saved.step_worst * 10
    (moved,) = results.moves
    assert moved.suspend > 0
    assert moved.resume > 0
    assert 0 < moved.downtime <= moved.migration
    page = bench.report(results)
    assert page.count("\n| mlp | 1 |") == 1
    assert page.count("\n| large | ") == 1
