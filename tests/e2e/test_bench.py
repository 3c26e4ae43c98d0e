"""The benchmark runs, small, and what it writes is complete."""

from __future__ import annotations

import pytest

from benchmarks import bench


@pytest.mark.e2e
@pytest.mark.slow
def test_small_benchmark_measures_both_sides_and_a_suspension() -> None:
    results = bench.run(bench.SMALL, ["mlp", "gpt2 generation"], threads=[1])
    assert [row.program for row in results.rows] == ["mlp", "gpt2 generation"]
    for row in results.rows:
        assert row.plain > 0
        assert row.ratio_low <= row.ratio <= row.ratio_high
    assert results.suspend_seconds > 0
    assert results.resume_seconds > 0
    page = bench.report(results)
    assert page.count("\n| mlp | 1 |") == 1
    assert "suspended in" in page
