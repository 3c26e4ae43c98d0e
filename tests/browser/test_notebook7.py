"""Notebook 7, where pages have one document each: other views open below the notebook."""

from __future__ import annotations

import pytest

from tests.browser.lab import Lab, Screen, patient, write_notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

APP = "notebook"
VIEWS = {"Activity": ".jp-SingActivity", "Checkpoints": ".jp-Sing-checkpointsContent"}


def test_activity_and_checkpoints_open_below_the_notebook(lab: Lab, screen: Screen) -> None:
    write_notebook(lab.root / "one.ipynb", "import torch\ntorch.ones(4, device='cuda').sum()")
    page = screen.page
    page.goto(f"{lab.url}notebooks/one.ipynb?token={lab.token}")
    screen.wait_for_kernel()
    screen.run(0)
    screen.await_state("idle")
    for link, view in VIEWS.items():
        screen.pill.click()
        screen.popover.get_by_text(link, exact=True).click()
        patient(page.locator(view)).to_be_visible()
    patient(page.locator(VIEWS["Activity"])).to_be_hidden()
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.locator(".lm-Menu-item", has_text="GPU").hover()
    page.locator(".lm-Menu-item", has_text="GPU Activity").click()
    patient(page.locator(VIEWS["Activity"])).to_be_visible()
    patient(page.locator(VIEWS["Activity"])).to_contain_text("one.ipynb")
    patient(screen.pill).to_be_in_viewport(ratio=1)
    screen.show("notebook7")
    screen.forgive("reading 'schema'")  # Notebook 7.6 says so of itself, without us, too
