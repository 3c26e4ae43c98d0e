"""A notebook whose user has a smaller memory quota than the device's size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.waiting import wait_until
from tests.e2e.kernels import kernel
from tests.e2e.trainers import status

pytestmark = [pytest.mark.e2e]

MIB = 1 << 20


def sing(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "jupyter_sing.cli", *arguments], check=True)


def test_a_lowered_quota_binds_is_named_and_locks_no_session_out(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1")
    policy = tmp_path / "policy.yaml"
    with kernel() as notebook:
        ones = "kept = [torch.ones(64 << 18, device='cuda') for _ in range(4)]"  # 256 MiB
        assert notebook.run(f"import torch; {ones}").error == ""
        free = "print(*(each >> 20 for each in torch.cuda.mem_get_info()))"
        assert notebook.run(free).stdout == "768 1024\n"

        policy.write_text("defaults: {quotas: {device_memory: 100 MiB}}")
        sing("policy", "apply", str(policy))
        assert wait_until(lambda: notebook.run(free).stdout == "0 100\n")
        ran = notebook.run("torch.ones(1 << 18, device='cuda')")
        assert ran.error == "OutOfMemoryError", ran
        assert "Your quota of 100.00 MiB on this machine does not allow that." in ran.error_text

        sing("suspend", status().sessions[0]["id"])
        assert notebook.run("del kept[1:]").error == ""
        assert notebook.run(free).stdout == "36 100\n"
        assert notebook.run("print(kept[0].sum().item())").stdout == "16777216.0\n"
