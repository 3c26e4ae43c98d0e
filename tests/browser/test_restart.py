"""The server is killed while a notebook is open, and started again."""

from __future__ import annotations

import signal

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAKE = """import os, torch
weights = torch.arange(10., device="cuda")
print("kernel", os.getpid())"""


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, id="terminated", marks=pytest.mark.exhaustive),
    ],
)
def test_notebook_is_unchanged_after_a_server_restart(
    lab: Lab, screen: Screen, number: int
) -> None:
    write_notebook(lab.root / "work.ipynb", MAKE, "print(os.getpid(), weights.sum().item())")
    screen.open("work.ipynb")
    screen.run(0)
    (kernel,), (session,) = lab.fetch("api/kernels"), lab.sessions()
    (row,) = lab.fetch("api/sessions")

    lab.kill(number)
    lab.start()
    assert [each["id"] for each in lab.fetch("api/kernels")] == [kernel["id"]]
    assert [each["id"] for each in lab.fetch("api/sessions")] == [row["id"]]
    assert [each["id"] for each in lab.sessions()] == [session["id"]]

    # JupyterLab reports a lost connection, if it has noticed.
    lost = screen.page.locator(".jp-Dialog", has_text="Server Connection Error")
    screen.page.add_locator_handler(lost, lambda: screen.page.keyboard.press("Escape"))
    screen.wait_for_kernel()
    patient(screen.pill).to_contain_text("Idle")
    screen.run(1)
    patient(screen.cell(1)).to_contain_text("45.0")
    screen.page.get_by_role("tab", name="Running Terminals and Kernels").click()
    patient(screen.page.locator(".jp-Sing-session")).to_have_count(1)
    screen.show("restarted")
    screen.forgive(r"net::ERR_|WebSocket|Failed to fetch|NetworkError|Could not reach")
