"""Descriptions of graphs: valid ones are rebuilt, and invalid ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunProgram
from tests.decorated import decorated

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "compiling" / "graphs.py"
CHECKS = decorated(PROGRAM, "check")


@pytest.fixture(scope="module")
def errors(run_program: RunProgram) -> dict[str, str]:
    """Return the errors of all checks, by name."""
    done = run_program(PROGRAM, proxied=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result["error"] for result in found}


@pytest.mark.parametrize("name", CHECKS)
def test_graphs(errors: dict[str, str], name: str) -> None:
    assert name in errors, "the check did not run"
    if errors[name]:
        pytest.fail(errors[name], pytrace=False)
