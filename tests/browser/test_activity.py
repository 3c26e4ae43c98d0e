"""The timeline of device activity."""

from __future__ import annotations

import json

import pytest

from tests.browser.lab import Lab, Screen, patient, write_notebook
from tests.doubles.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRAIN = """import pathlib, torch
kept = torch.zeros({mebibytes} << 18, device="cuda")
weights = torch.randn(256, 256, device="cuda")
while not pathlib.Path("stop").exists():
    weights = torch.tanh(weights @ weights.T / 16)
    weights.sum().item()"""


@pytest.mark.parametrize(
    "lab", [("cpu:1GiB@1,cpu:1GiB@1", "--SingExtension.idle_timeout=0")], indirect=True
)
def test_activity_is_shown_and_kept_in_the_layout(lab: Lab, screen: Screen) -> None:
    names = ("digits.ipynb", "speech.ipynb", "thesis.ipynb")
    for name, mebibytes in zip(names, (200, 350, 120), strict=True):
        write_notebook(lab.root / name, TRAIN.format(mebibytes=mebibytes))
        screen.open(name)
        screen.run(0, wait=False)
        screen.await_state("running", "queued")

    def turns() -> bool:
        devices = lab.fetch("jupyter-sing/api/activity")["devices"]
        return sum(len(each["held"]) for each in devices) > 8

    wait_until(turns)
    (lab.root / "stop").touch()
    wait_until(lambda: all(each["state"] == "idle" for each in lab.sessions()))
    for session in lab.sessions():
        path = f"jupyter-sing/api/sessions/{session['id']}"
        target = "cpu:1" if session["device"] == "cpu:0" else "cpu:0"
        lab.fetch(f"{path}/migrate", "POST", {"device": target})
        lab.fetch(f"{path}/checkpoint", "POST", {"name": f"of-{session['id']}"})
        lab.fetch(f"{path}/suspend", "POST")
        lab.fetch(f"{path}/resume", "POST")

    screen.command("GPU Activity")
    view = screen.page.locator(".jp-SingActivity")
    patient(view).to_contain_text("Simulated GPU 0")
    patient(view).to_contain_text("Simulated GPU 1")
    screen.page.get_by_role("button", name="5 min").click()
    # A closer view requests a higher resolution.
    with screen.page.expect_response(lambda response: "resolution=0." in response.url):
        screen.page.get_by_role("button", name="Zoom in").click(click_count=3)
    for name in names:
        patient(view).to_contain_text(name)
    screen.show("activity")
    screen.page.get_by_role("button", name="table").click()
    for word in ("Running", "Suspended", "Resumed", "Migrated", "Checkpoint"):
        patient(view).to_contain_text(word)

    # JupyterLab saves its layout after a short while.
    wait_until(
        lambda: "jupyter-sing-activity" in json.dumps(lab.fetch("lab/api/workspaces/default"))
    )
    screen.page.goto(f"{lab.url}lab?token={lab.token}")
    patient(view).to_contain_text("Simulated GPU 0")
