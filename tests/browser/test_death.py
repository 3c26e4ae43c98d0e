"""A kernel dies, and JupyterLab offers to restore its last checkpoint."""

from __future__ import annotations

import os
import signal

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_dead_kernel_is_restored_with_a_click(lab: Lab, screen: Screen) -> None:
    make = "import torch\nweights = torch.arange(10., device='cuda')\nweights.sum().item()"
    write_notebook(lab.root / "work.ipynb", make, "print('again', weights.sum().item())")
    screen.open("work.ipynb")
    screen.run(0)
    (session,) = lab.sessions()
    path = f"jupyter-sing/api/sessions/{session['id']}"
    lab.fetch(f"{path}/checkpoint", "POST", {"name": "before-the-crash"})

    os.kill(session["kernel_pid"], signal.SIGKILL)
    # JupyterLab says so, too, and waits for an answer.
    told = screen.page.locator(".jp-Dialog", has_text="Kernel Restarting")
    screen.page.add_locator_handler(told, lambda: told.locator("button").last.click())
    toast = screen.page.locator(".Toastify__toast", has_text="before-the-crash")
    patient(toast).to_be_visible()
    screen.show("died")
    toast.get_by_role("button", name="Restore").click()
    with screen.page.expect_response(lambda response: "/restore" in response.url) as restored:
        screen.page.locator(".jp-Dialog", has_text="Restore").locator(".jp-mod-accept").click()
    assert restored.value.ok
    screen.run(1)
    patient(screen.cell(1)).to_contain_text("again 45.0")
    screen.forgive("Could not restore the debugger state|Canceled future")
