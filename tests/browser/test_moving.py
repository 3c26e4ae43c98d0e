"""Migration of a session to another device while its cell trains."""

from __future__ import annotations

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook
from tests.doubles.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# The cell trains until the file exists, so that there is time to migrate the session. The results
# that it has computed until then must be the same as on any device.
TRAIN = """import torch, pathlib
torch.manual_seed(7)
weights = torch.randn(64, 64, device="cuda")
step = 0
while not pathlib.Path("stop").exists():
    weights = torch.tanh(weights @ weights.T / 8) + 0.5
    step += 1
    if step % 20 == 0:
        weights.sum().item()"""

CHECK = """again = torch.manual_seed(7) and torch.randn(64, 64, device="cuda")
for _ in range(step):
    again = torch.tanh(again @ again.T / 8) + 0.5
print("the same:", torch.equal(again, weights), torch.isfinite(weights).all().item())"""


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_training_session_is_migrated_in_the_panel(lab: Lab, screen: Screen) -> None:
    write_notebook(lab.root / "train.ipynb", TRAIN, CHECK)
    screen.open("train.ipynb")
    screen.run(0, wait=False)
    screen.await_state("running")
    (session,) = lab.sessions()
    source = session["device"]
    target = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[source]

    screen.page.get_by_role("tab", name="Running Terminals and Kernels").click()
    item = screen.page.locator(".jp-Sing-session")
    item.click(button="right")
    screen.page.locator(".lm-Menu-item:visible", has_text="Migrate").click()
    screen.page.locator(f".jp-Dialog input[value='{target}']").check()
    screen.moving += "|jp-RunningSessions-item"  # the session is shown below its new device
    screen.page.locator(".jp-Dialog .jp-mod-accept").click()
    named = f"Simulated GPU {target[-1]}"
    patient(screen.page.locator(".jp-RunningSessions")).to_contain_text(named)

    def moved() -> bool:
        (session,) = lab.sessions()
        return session["device"] == target and session["state"] != "migrating"

    wait_until(moved)
    screen.show("moved")
    assert lab.sessions()[0]["state"] in ("running", "idle")

    (lab.root / "stop").touch()
    screen.finish(0)
    screen.run(1)
    patient(screen.cell(1)).to_contain_text("the same: True True")
