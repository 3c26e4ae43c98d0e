"""Checkpoint, restart of the kernel, and restore from the view."""

from __future__ import annotations

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAKE = """import torch
torch.manual_seed(3)
weights = torch.randn(1000, device="cuda").cumsum(0)
note = "before the restart"
weights.sum().item()"""


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_notebook_is_saved_and_restored_in_the_view(lab: Lab, screen: Screen) -> None:
    write_notebook(lab.root / "work.ipynb", MAKE, "print(note, weights.sum().item())")
    screen.open("work.ipynb")
    screen.run(0)
    made = screen.cell(0).locator(".jp-OutputArea-output").inner_text().strip()

    screen.pill.click()
    screen.popover.get_by_role("button", name="Save checkpoint", exact=True).click()
    screen.page.locator(".jp-Dialog input").fill("before-lunch")
    screen.page.locator(".jp-Dialog .jp-mod-accept").click()
    screen.command("Checkpoints")
    rows = screen.page.locator(".jp-Sing-checkpoint")
    patient(rows.filter(has_text="before-lunch")).to_have_count(1)

    screen.page.get_by_role("tab", name="work.ipynb").click()
    screen.command("Restart Kernel…")
    screen.page.locator(".jp-Dialog .jp-mod-accept").click()
    screen.wait_for_kernel()

    screen.page.get_by_role("tab", name="Checkpoints").click()
    row = rows.filter(has_text="before-lunch")
    row.get_by_role("button", name="Restore").first.click()
    with screen.page.expect_response(lambda response: "/restore" in response.url) as restored:
        screen.page.locator(".jp-Dialog .jp-mod-accept").click()
    assert restored.value.ok
    screen.show("checkpoints")
    screen.page.get_by_role("tab", name="work.ipynb").click()
    screen.run(1)
    patient(screen.cell(1)).to_contain_text(f"before the restart {made}")
    screen.show("restored")
    # JupyterLab's own, if the kernel restarts while its debugger is being asked.
    screen.forgive("Could not restore the debugger state")
