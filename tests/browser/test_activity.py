"""The timeline of what devices did."""

from __future__ import annotations

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAKE = """import torch
weights = torch.randn(1 << 24, device="cuda")
weights.square_().sum().item() > 0"""


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_what_was_done_is_seen_and_stays_in_the_layout(lab: Lab, screen: Screen) -> None:
    write_notebook(lab.root / "first.ipynb", MAKE)
    write_notebook(lab.root / "second.ipynb", MAKE)
    for name in ("first.ipynb", "second.ipynb"):
        screen.open(name)
        screen.run(0)
    for session in lab.sessions():
        path = f"jupyter-sing/api/sessions/{session['id']}"
        target = "cpu:1" if session["device"] == "cpu:0" else "cpu:0"
        lab.fetch(f"{path}/migrate", "POST", {"device": target})
        lab.fetch(f"{path}/suspend", "POST")
        lab.fetch(f"{path}/resume", "POST")
        lab.fetch(f"{path}/checkpoint", "POST", {"name": f"of-{session['id']}"})
    screen.command("GPU Activity")
    view = screen.page.locator(".jp-SingActivity")
    patient(view).to_contain_text("cpu:0")
    patient(view).to_contain_text("cpu:1")
    screen.page.get_by_role("button", name="5 min").click()
    screen.show("activity")
    screen.page.get_by_role("button", name="table").click()
    for word in ("Suspended", "Resumed", "Moved", "Checkpoint"):
        patient(view).to_contain_text(word)
