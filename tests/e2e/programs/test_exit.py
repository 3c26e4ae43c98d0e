"""The exit of programs that use a proxied device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunProgram, daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "training" / "ending.py"
RUNS = 5  # Python ends threads at different points of their wait


def test_threads_that_wait_for_the_device_do_not_abort_the_process(
    tmp_path: Path, run_program: RunProgram
) -> None:
    with pytest.MonkeyPatch.context() as patch, daemon_directory(tmp_path / "runtime", patch):
        for _ in range(RUNS):
            done = run_program(PROGRAM, proxied=True, env={"JUPYTER_SING_DEVICES": "cpu:1GiB"})
            assert done.stdout == "done\n", done.stderr
