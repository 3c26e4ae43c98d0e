"""An operator that needs more memory than its control group allows."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.waiting import wait_until
from tests.e2e.kernels import kernel
from tests.e2e.trainers import status
from tests.integration.conftest import lives, parent_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a control group (version 1) with little memory; skip where none can be made."""
    path = GROUPS / f"sing-{secrets.token_hex(4)}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(1200 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield path
    for pid in (path / "cgroup.procs").read_text().split():
        (GROUPS / "cgroup.procs").write_text(pid)
    path.rmdir()


def test_an_operator_that_wants_more_memory_than_the_machine_has_costs_itself_alone(
    group: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:8GiB@1")
    with kernel() as notebook:
        assert notebook.run("import torch; kept = torch.arange(9.0, device='cuda')").error == ""
        assert notebook.run("print(kept.sum().item())").stdout == "36.0\n"
        (session,) = status().sessions
        worker = session["worker_pid"]
        assert worker is not None
        # The next workers are in the group of their zygote.
        (group / "cgroup.procs").write_text(str(parent_of(worker)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not lives(worker))
        ran = notebook.run("large = torch.ones(3 << 28, device='cuda'); large.sum().item()")
        assert ran.error == "OutOfMemoryError", ran
        assert ran.error_text.startswith("Out of host memory: "), ran.error_text
        killed = (group / "memory.oom_control").read_text().split()
        assert int(killed[killed.index("oom_kill") + 1]) == 3
        assert notebook.run("print(kept.sum().item())").stdout == "36.0\n"
