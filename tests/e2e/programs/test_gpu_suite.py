"""The suite for machines with a GPU runs: all of it on one, some steps on a software device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.devices import cuda
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run_suite(out: Path, *arguments: str) -> dict[str, dict[str, str]]:
    """Run it with small parameters; return the outcomes by step."""
    command = [
        str(ROOT / "benchmarks" / "gpu_suite.sh"), "--small", "--out", str(out), *arguments,
    ]  # fmt: skip
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    steps = json.loads((out / "gpu_suite.json").read_text())["steps"]
    outcomes = {step["step"]: step for step in steps}
    failed = {name: each for name, each in outcomes.items() if each["state"] in ("failed", "late")}
    assert failed == {}, done.stderr[-4000:]
    assert done.returncode == 0
    assert "| moves | passed |" in (out / "gpu_suite.md").read_text()
    return outcomes


@pytest.mark.alone
def test_steps_of_the_suite_pass_on_a_software_device(tmp_path: Path) -> None:
    steps = ["machine", "faults", "moves"]
    found = run_suite(tmp_path, "--device", "cpu", "--seconds", "5000", "--only", *steps)
    assert list(found) == steps
    assert any("suspend" in row for row in found["moves"]["table"])


@pytest.mark.gpu
def test_the_suite_passes_on_a_gpu(tmp_path: Path) -> None:
    if not cuda.all_devices():
        pytest.skip("there is no GPU")
    assert run_suite(tmp_path)
