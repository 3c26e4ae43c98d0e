"""PyTorch's own samples of its operators have the same results with and without the proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import running
from tests.conformance.refused import REFUSED
from tests.conftest import daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# One dtype where an operator supports it, and few samples: `make conformance` runs all.
CHOICE = ["--samples=8", "--dtypes", "float32"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[running.Report]:
    """Return the results of the samples, which run in two programs."""
    runtime_dir = tmp_path_factory.mktemp("conformance") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        found = running.run(2, CHOICE)
        print("\n".join(found.lines()))
        yield found


def test_no_sample_fails(report: running.Report) -> None:
    if report.failed:
        pytest.fail("\n".join(report.lines()), pytrace=False)


def test_almost_all_samples_pass(report: running.Report) -> None:
    assert report.passed > 3000
    assert report.passing >= 0.99


def test_refused_operators_are_listed_with_their_reason(report: running.Report) -> None:
    assert report.refusals == {}
    assert len(REFUSED) < 15
    assert all(REFUSED.values())
