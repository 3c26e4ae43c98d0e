"""Random programs have the same results on the proxied device as on the CPU, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunProgram

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "operators" / "random_tensors.py"
COUNT = 500


def test_random_programs_do_the_same(runtime_dir: Path, run_program: RunProgram) -> None:
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JUPYTER_SING_DEVICES": "cpu:1GiB@1"}
    done = run_program(PROGRAM, "0", str(COUNT), proxied=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["differs"], found["differs"][:5]
    assert found["steps"] > 10 * COUNT
    assert found["refused"] > COUNT
