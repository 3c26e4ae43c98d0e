"""Files are restored completely, whenever the process that restores them is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["links", "copies"])
def test_killed_before_any_step_each_file_is_old_or_new_and_can_be_finished(
    tmp_path: Path, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.doubles.storage.restoring", str(tmp_path), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
