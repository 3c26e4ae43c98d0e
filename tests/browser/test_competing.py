"""Two notebooks that want the same device: the second waits and sees the expected wait."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.browser.lab import Lab, Screen, patient, write_notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRAIN = """import torch
weights = torch.randn(512, 512, device="cuda", requires_grad=True)
for step in range(10**9):
    loss = (torch.randn(256, 512, device="cuda") @ weights).square().mean()
    loss.backward()
    with torch.no_grad():
        weights -= 0.1 * weights.grad
        weights.grad = None"""


@pytest.mark.parametrize("lab", [("cpu:1GiB@1", "--SingExtension.idle_timeout=0")], indirect=True)
def test_waiting_notebook_shows_position_and_time(
    lab: Lab, open_screen: Callable[[], Screen]
) -> None:
    write_notebook(lab.root / "first.ipynb", TRAIN)
    write_notebook(lab.root / "second.ipynb", TRAIN)
    first, second = open_screen(), open_screen()
    first.open("first.ipynb")
    first.run(0, wait=False)
    first.await_state("running")
    second.open("second.ipynb")
    second.run(0, wait=False)
    for screen, other in ((first, "second"), (second, "first")):
        patient(screen.pill).to_contain_text("Sharing")
        title = re.compile(rf"^Sharing Simulated GPU 0 with {other}\.ipynb · my share \d+\s% · ")
        patient(screen.pill).to_have_attribute("title", title)
    second.pill.click()
    patient(second.popover).to_contain_text(re.compile(r"My share \d+\s% · "))
    second.show("queued")
    first.page.set_viewport_size({"width": 700, "height": 700})
    patient(first.pill).to_be_in_viewport(ratio=1)  # not in an overflow menu
    first.show("narrow")
    # The text is the same in each turn, as the holder changes all the time.
    assert second.states()[-1] == "running"
