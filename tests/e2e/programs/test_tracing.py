"""Results of torch's tools that inspect the device's operators."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT, RunProgram

PROGRAM = ROOT / "tests" / "programs" / "compiling" / "tracing.py"


@pytest.mark.e2e
@pytest.mark.slow
def test_traces_exports_and_maps_give_what_they_give_on_the_cpu(run_program: RunProgram) -> None:
    *differences, agreed = run_program(PROGRAM, proxied=True).stdout.splitlines()
    assert differences == []
    assert int(agreed) > 120  # of 140; torch does not support the rest on the CPU either
