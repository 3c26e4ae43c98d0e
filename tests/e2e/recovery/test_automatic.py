"""Real notebooks with automatic checkpoints, which are offered when their kernel has died."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_sing.cli import commands
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import Kernel, kernel, sessions, wait_for_session

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _settings(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "digits.ipynb"))


def said(notebook: Kernel, code: str) -> str:
    ran = notebook.run(code)
    assert (ran.error, ran.stderr) == ("", ""), code
    return ran.stdout.strip()


def without_form(text: str) -> str:
    """Return a restore message without the process, which may not be saved on this machine."""
    return text.replace(", with the process", "")


def listed() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "jupyter_sing.cli", "checkpoints", "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    return list(json.loads(done.stdout)["checkpoints"])


def wait_for(number: int) -> list[str]:
    """Wait for this many checkpoints; return their names, the oldest first."""
    return [each["name"] for each in wait_until(lambda: enough(listed(), number))][::-1]


def enough(found: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return found if len(found) >= number else []


def die(notebook: Kernel) -> None:
    """Kill the kernel, and do what a server does when it notices."""
    session = wait_for_session(lambda found: bool(found["kernel_pid"]))
    os.kill(existing(session["kernel_pid"]), signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive())
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=120)
    # The answer for which the client has waited may be from the kernel that died.
    wait_for_session(lambda found: bool(found["kernel_pid"]))


def test_a_notebook_comes_back_with_one_command_after_its_kernel_died() -> None:
    with kernel() as notebook:
        assert said(notebook, "%sing auto") == "Automatic checkpoints: off"
        assert said(notebook, "%sing auto 2 cells") == (
            "Automatic checkpoints: every 2 cells; keeps the last 3"
        )
        notebook.run("import torch\nx = torch.arange(5., device='cuda'); y = [x, 'kept']")
        (name,) = wait_for(1)
        assert name.startswith("digits-auto-")
        said(notebook, "lost = 1; x += 1")
        die(notebook)
        first, *_ = said(notebook, "%sing").splitlines()[1:]
        assert re.fullmatch(rf"The last kernel died. Run %sing restore to restore {name} .*", first)
        assert without_form(said(notebook, "%sing restore")) == f"Restored 3 variables from {name}"
        assert said(notebook, "print(y[0].sum().item(), y[0] is x, 'lost' in globals())") == (
            "10.0 True False"
        )


def test_a_notebook_that_never_uses_torch_has_all_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_CHECKPOINT_CELLS", "1")
    monkeypatch.setenv("JUPYTER_SING_CHECKPOINT_KEEP", "2")
    with kernel() as notebook:
        made: list[str] = []
        for number in range(3):
            said(notebook, f"n = {number}")
            made.append(wait_until(lambda: newest_but(made)))
        wait_until(lambda: [each["name"] for each in listed()] == made[:0:-1])
        said(notebook, "%sing auto off")
        (session,) = sessions()
        assert session["operators"] == 0  # it has not attached
        assert commands.main(["checkpoint", session["id"], "--name", "mine"]) == 0
        said(notebook, "n = 'lost'")
        die(notebook)
        capsys.readouterr()
        assert commands.main(["restore", "--last"]) == 0
        assert without_form(capsys.readouterr().out) == "Restored 1 variable from mine\n"
        assert said(notebook, "print(n)") == "2"


def newest_but(known: list[str]) -> str:
    """Return the name of the newest checkpoint, unless it is known."""
    found = listed()
    return "" if not found or found[0]["name"] in known else str(found[0]["name"])


def test_a_restart_that_was_wanted_is_no_death() -> None:
    with kernel() as notebook:
        assert said(notebook, "%sing").count("\n") == 0
        said(notebook, "n = 1")
        said(notebook, "%sing checkpoint mine")
        assert re.fullmatch(r"Last checkpoint: mine \(.*\)", said(notebook, "%sing").split("\n")[1])
        notebook.restart()
        line = said(notebook, "%sing").split("\n")[1]
        assert re.fullmatch(r"From an earlier kernel. Run %sing restore to restore mine .*", line)


def test_notebooks_outlive_the_end_of_the_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    with kernel() as notebook:
        notebook.run("import torch\nx = torch.arange(5., device='cuda')")
        assert commands.main(["stop"]) == 0
        name, end = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"Saved checkpoint digits-auto-[-0-9a-f]+\.", name)
        assert end == "Stopped the daemon and its sessions."
        assert "daemon stopped" in notebook.run("x.sum().item()").error_text
    with kernel() as notebook:
        text = without_form(said(notebook, "%sing restore"))
        assert re.fullmatch(r"Restored 2 variables from digits-auto-[-0-9a-f]+", text)
        assert said(notebook, "print(x.sum().item())") == "10.0"
