"""PyTorch's own samples of its operators have the same results with and without the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance import running
from tests.conformance.refused import REFUSED
from tests.conftest import daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# One dtype where an operator supports it, and few samples of each: `make conformance` runs all.
CHOICE = ("--dtypes", "float32")
SHARDS = 4
MORE = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]
#: Samples of each operator, and how many pass at least.
FEW, MANY = (2, 1900), (8, 3000)
amounts = pytest.mark.parametrize(
    ("samples", "passing"),
    [pytest.param(*FEW, id="few"), pytest.param(*MANY, id="many", marks=MORE)],
)

Shard = Callable[[int, int], running.Report]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    """Return a function that runs a part of the operators once, with a number of samples."""
    known: dict[tuple[int, int], running.Report] = {}

    def run(samples: int, number: int) -> running.Report:
        if (samples, number) not in known:
            arguments = (f"--samples={samples}", f"--shard={number}", f"--shards={SHARDS}", *CHOICE)
            report = known[samples, number] = running.Report()
            for result in running.run_shard(arguments):
                report.add(result)
            print("\n".join(report.lines()))
        return known[samples, number]

    runtime_dir = tmp_path_factory.mktemp("conformance") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        yield run


@pytest.mark.parametrize("number", range(SHARDS))
@amounts
def test_no_sample_fails(shard: Shard, samples: int, passing: int, number: int) -> None:
    report = shard(samples, number)
    assert report.passed > 0
    if report.failed:
        pytest.fail("\n".join(report.lines()), pytrace=False)


@amounts
def test_almost_all_samples_pass(shard: Shard, samples: int, passing: int) -> None:
    reports = [shard(samples, number) for number in range(SHARDS)]
    passed = sum(each.passed for each in reports)
    assert passed > passing
    assert passed / (passed + sum(each.refused + each.failed for each in reports)) >= 0.99


@amounts
def test_refused_operators_are_listed_with_their_reason(
    shard: Shard, samples: int, passing: int
) -> None:
    assert [shard(samples, number).refusals for number in range(SHARDS)] == [{}] * SHARDS
    assert len(REFUSED) < 15
    assert all(REFUSED.values())
