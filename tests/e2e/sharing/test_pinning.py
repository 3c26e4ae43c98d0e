"""A notebook pins its memory on its device, and sessions that wait for it show that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.kernels import kernel, sessions, wait_for_sessions

pytestmark = [pytest.mark.e2e]

FILL = "import torch\na = torch.ones({} << 18, device='cuda')\nprint(a.sum().item())"


@pytest.fixture(autouse=True)
def _sing(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:384MiB@1")
    monkeypatch.setenv("JUPYTER_SING_IDLE_TIMEOUT", "1")
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")


def test_a_pinned_notebook_stays_and_waiters_see_the_reason() -> None:
    with kernel() as second, kernel() as first:
        second.run(FILL.format(200))
        wait_for_sessions(lambda found: any(each["state"] == "suspended" for each in found))
        assert first.run("%sing pin").stdout.startswith(
            "Pinned: once resumed, its memory stays on Simulated GPU 0."
        )
        first.run(FILL.format(200))
        assert first.run("%sing pin").stdout == "Pinned: its memory stays on Simulated GPU 0.\n"
        assert first.run("%sing priority basic").stdout == "Priority: basic\n"
        cell = second.begin("print(a.sum().item())")
        found = wait_for_sessions(
            lambda found: any("is pinned and keeps" in s["reason"] for s in found)
        )
        (waiting,) = (each for each in found if "is pinned and keeps" in each["reason"])
        assert "on Simulated GPU 0: " in waiting["reason"]
        (pinned,) = (each for each in sessions() if each["pinned"])
        assert (pinned["tier"], pinned["priority"]) == ("resident", "basic")
        assert first.run("print(a.sum().item())").stdout == f"{200 << 18}.0\n"
        first.run("%sing unpin")
        assert second.finish(cell).stdout == f"{200 << 18}.0\n"
