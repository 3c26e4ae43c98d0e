"""A job that a notebook starts: its ranks in the panel of what runs, while they train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.common.protocol import Resume, Suspend
from tests.browser.conftest import TWO
from tests.browser.lab import Lab, Screen, patient, write_notebook
from tests.doubles.waiting import wait_until
from tests.e2e.trainers import program, verb

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
    first, *others = accelerator.gather(weights).chunk(accelerator.num_processes)
    same = all(torch.equal(first, each) for each in others)
    place = f"rank {accelerator.process_index} on {accelerator.device}"
    print(f"{place}: {same}\\n", end="", flush=True)
notebook_launcher(train, (), num_processes=2)"""

AGAIN = """shape = net(torch.ones(1, 8, device="cuda")).shape
print("kept:", torch.equal(net.weight.cpu(), weight), shape)"""


def await_job(screen: Screen, where: str | None) -> None:
    """Wait until the page knows where the notebook's job runs, or that it has none.

    Rows that come and go move others: the panel is shown once they are what a test expects.
    """
    screen.pill.click()
    patient(screen.popover).to_be_visible()
    started = patient(screen.popover.get_by_text(re.compile("^Started from here:")))
    if where is None:
        started.to_have_count(0)
    else:
        started.to_have_text(re.compile(where))
    screen.show("started")
    screen.page.keyboard.press("Escape")


@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_ranks_of_a_notebook_are_below_it_while_they_train(lab: Lab, screen: Screen) -> None:
    write_notebook(lab.root / "lessons" / "train.ipynb", TRAIN, JOB, AGAIN)
    screen.open("lessons/train.ipynb")
    screen.run(0)
    screen.run(1, wait=False)
    wait_until(lambda: sum(each["ranks"] == 2 for each in lab.sessions()) == 2)

    await_job(screen, "2 ranks on 2 GPUs$")
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
    screen.show("ranks")

    screen.page.get_by_role("tab", name=re.compile("^File Browser")).click()
    (lab.root / "lessons" / "stop").touch()
    screen.finish(1)
    for rank in range(2):
        patient(screen.cell(1)).to_contain_text(f"rank {rank} on cuda:{rank}: True")
    await_job(screen, None)
    panel.click()
    patient(tree.locator(".jp-Sing-jobItem")).to_have_count(0)
    patient(tree.locator(".jp-Sing-session")).to_have_count(1)
    screen.run(2)
    patient(screen.cell(2)).to_contain_text("kept: True torch.Size([1, 2])")


POLICY = """
jobs: {grow_after: 1 s}
virtual_clusters: {lab: {users: [{name: alice, tier: premium}, bob]}}
"""
FOUR = JOB.replace("num_processes=2", "num_processes=4")
ON_TWO = "Job of 4 ranks runs on 2 devices."
ON_ONE = "Job of 4 ranks runs on 1 of 2 devices: alice waits with premium"


@pytest.fixture
def policy(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let alice come before bob, the user of the notebooks."""
    monkeypatch.setenv("JUPYTER_SING_DEVICES", TWO)
    monkeypatch.setenv("JUPYTER_SING_USER", "bob")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    command = [sys.executable, "-m", "jupyter_sing.cli", "policy", "apply", str(file)]
    subprocess.run(command, check=True, capture_output=True)


def on_devices(lab: Lab) -> int:
    """Return on how many devices the job of four ranks runs; 0: not all do."""
    ranks = [each for each in lab.sessions() if each["ranks"] == 4 and each["state"] == "running"]
    return len({each["device"] for each in ranks}) if len(ranks) == 4 else 0


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize("lab", [(TWO, "--SingExtension.idle_timeout=0")], indirect=True)
def test_a_job_is_squeezed_by_a_premium_cell_and_grows_again(
    lab: Lab, screen: Screen, tmp_path: Path
) -> None:
    write_notebook(lab.root / "train.ipynb", TRAIN, FOUR, AGAIN)
    screen.open("train.ipynb")
    screen.run(0)
    tree = screen.page.get_by_role("region", name="GPUs Section").get_by_role("tree")
    notebook = tree.locator(".jp-Sing-session.jp-mod-mine", has_text="train.ipynb").first
    job = notebook.locator(".jp-Sing-jobItem .jp-Sing-row").first

    def see_job(count: str, reason: str, name: str) -> None:
        await_job(screen, count)
        screen.page.get_by_role("tab", name="Running Terminals and Kernels").click()
        patient(job.locator(".jp-Sing-rowWord")).to_have_text(re.compile(f"^{count}"))
        patient(job).to_have_attribute("title", re.compile(re.escape(reason)))
        screen.show(name)
        screen.page.get_by_role("tab", name=re.compile("^File Browser")).click()

    enough = tmp_path / "enough"
    with program(1, proxied=True, user="alice") as alice:
        assert alice.answer() == ["ready"]
        # Else its turn lasts until others wait for the device, which a job that grows does not do.
        verb(Suspend(alice.session))
        screen.run(1, wait=False)
        wait_until(lambda: on_devices(lab) == 2)
        see_job("4 ranks on 2 GPUs$", ON_TWO, "job-on-two")
        verb(Resume(alice.session))
        alice.ask(str(enough))
        try:
            wait_until(lambda: on_devices(lab) == 1)
            see_job("4 ranks on Simulated GPU [01]$", ON_ONE, "job-squeezed")
        finally:
            enough.touch()
        assert alice.answer()
    wait_until(lambda: on_devices(lab) == 2)
    see_job("4 ranks on 2 GPUs$", ON_TWO, "job-on-two-again")
    (lab.root / "stop").touch()
    screen.finish(1)
    for number in range(4):
        patient(screen.cell(1)).to_contain_text(f"rank {number} on cuda:{number}: True")
    screen.run(2)
    patient(screen.cell(2)).to_contain_text("kept: True torch.Size([1, 2])")
