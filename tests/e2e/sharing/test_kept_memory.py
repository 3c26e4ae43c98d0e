"""Host memory that a software device caches for a program's next tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.waiting import wait_until
from tests.e2e.kernels import kernel
from tests.e2e.trainers import status

pytestmark = [pytest.mark.e2e]

MIB = 1 << 20
PAGE = 4096
#: Each is freed before the next one is made.
TIMES = 20
STEPS = f"""
for _ in range({TIMES}):
    total = torch.ones(64 << 18, device="cuda").sum().item()
print(total)
"""


def resident(worker: int) -> int:
    """Return the bytes of anonymous memory of a process."""
    lines = Path(f"/proc/{worker}/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(found) << 10


def faults(worker: int) -> int:
    """Return the number of page faults of a process, if each is for a small page."""
    return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[7])


def test_freed_memory_is_kept_while_a_program_runs_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1")
    with kernel() as notebook:
        begin = "import torch; print(torch.ones(9, device='cuda').sum().item())"
        assert notebook.run(begin).stdout == "9.0\n"
        worker = status().sessions[0]["worker_pid"]
        assert worker is not None
        before, resident_before = faults(worker), resident(worker)
        assert notebook.run(STEPS).stdout == "16777216.0\n"
        # Two blocks, because a block may be freed after the next one was made.
        assert faults(worker) - before < 3 * 64 * MIB // PAGE
        assert wait_until(lambda: resident(worker) - resident_before < 32 * MIB)
        assert status().sessions[0]["worker_pid"] == worker
