"""A job that a notebook starts: its ranks in the panel of what runs, while they train."""

from __future__ import annotations

import re

import pytest

from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook
from tests.doubles.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRAIN = """import torch
torch.manual_seed(7)
net = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(4, 8, device="cuda")).square().sum().backward()
    optimizer.step()
weight = net.weight.detach().cpu()"""

# The ranks train until all have seen the file, so that there is time to look at them.
JOB = """from pathlib import Path
from accelerate import Accelerator, notebook_launcher
def train():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    stopped = 0
    while stopped < accelerator.num_processes:
        inputs = torch.randn(4, 8, device=accelerator.device)
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen = torch.tensor(int(Path("stop").exists()), device=accelerator.device)
        stopped = accelerator.reduce(seen, "sum").item()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    same = torch.equal(*accelerator.gather(weights).chunk(2))
    place = f"rank {accelerator.process_index} on {accelerator.device}"
    print(f"{place}: {same}\\n", end="", flush=True)
notebook_launcher(train, (), num_processes=2)"""

AGAIN = """shape = net(torch.ones(1, 8, device="cuda")).shape
print("kept:", torch.equal(net.weight.cpu(), weight), shape)"""


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_ranks_of_a_notebook_are_below_it_while_they_train(lab: Lab, screen: Screen) -> None:
    write_notebook(lab.root / "lessons" / "train.ipynb", TRAIN, JOB, AGAIN)
    screen.open("lessons/train.ipynb")
    screen.run(0)
    screen.run(1, wait=False)
    wait_until(lambda: sum(each["ranks"] == 2 for each in lab.sessions()) == 2)

    panel = screen.page.get_by_role("tab", name="Running Terminals and Kernels")
    panel.click()
    tree = screen.page.get_by_role("region", name="GPUs Section").get_by_role("tree")
    notebook = tree.locator(".jp-Sing-session.jp-mod-mine", has_text="train.ipynb").first
    job = notebook.locator(".jp-Sing-jobItem")
    patient(job.locator(".jp-Sing-rowName")).to_have_text("train.ipynb")
    patient(job.locator(".jp-Sing-rowWord").first).to_have_text("2 ranks on 2 GPUs")
    ranks = job.locator(".jp-Sing-session .jp-Sing-rowRank")
    patient(ranks).to_have_text(["Rank 0", "Rank 1"])
    devices = job.locator(".jp-Sing-rowDevice")
    named = ["Simulated GPU 0", "Simulated GPU 1"]
    wait_until(lambda: sorted(devices.all_text_contents()) == named)
    (session,) = (each for each in lab.sessions() if each["kernel_id"])
    other = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[session["device"]]
    part = tree.locator(f"[data-context='{other}'] .jp-Sing-jobItem .jp-Sing-rowWord")
    patient(part).to_have_text("1 of 2 ranks")

    screen.pill.click()
    patient(screen.popover).to_contain_text("Started from here: 2 ranks on 2 GPUs")
    screen.show("ranks")
    screen.page.keyboard.press("Escape")

    # Rows that end move those below them; in a panel that is not shown, that is no jump.
    screen.page.get_by_role("tab", name=re.compile("^File Browser")).click()
    (lab.root / "lessons" / "stop").touch()
    screen.finish(1)
    for rank in range(2):
        patient(screen.cell(1)).to_contain_text(f"rank {rank} on cuda:{rank}: True")
    panel.click()
    patient(tree.locator(".jp-Sing-jobItem")).to_have_count(0)
    patient(tree.locator(".jp-Sing-session")).to_have_count(1)
    screen.run(2)
    patient(screen.cell(2)).to_contain_text("kept: True torch.Size([1, 2])")
