"""The tutorial, as a new user sees it: the session is suspended when idle, and resumes."""

from __future__ import annotations

import shutil

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=2")], indirect=True)
def test_idle_notebook_is_suspended_and_resumed_by_the_next_cell(lab: Lab, screen: Screen) -> None:
    shutil.copy(ROOT / "docs" / "tutorial.ipynb", lab.root)
    screen.open("tutorial.ipynb")
    for number in range(3):
        screen.run(number)
    assert "running" in screen.states()
    patient(screen.cell(2)).to_contain_text("accuracy on the test set: 9")

    screen.await_state("suspended")
    patient(screen.pill).to_contain_text("Suspended")
    screen.pill.click()
    patient(screen.popover).to_contain_text("Resumes when you run a cell")
    screen.show("suspended")
    screen.page.keyboard.press("Escape")
    patient(screen.popover).to_have_count(0)

    seen = len(screen.states())
    screen.run(8)
    assert "running" in screen.states()[seen:]
    patient(screen.cell(8)).to_contain_text("accuracy on the test set: 9")
    screen.show("resumed")
