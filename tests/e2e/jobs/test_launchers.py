"""Ranks are started in each of the usual ways, also by a notebook that has used the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.kernels import Kernel, kernel, sessions, wait_for_sessions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "programs" / "jobs"
#: What users do before they think of more than one rank: train, and compute with many threads.
TRAIN = """
import torch
torch.set_num_threads(2)
net = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(4, 8, device="cuda")).square().sum().backward()
    optimizer.step()
large = torch.ones(1 << 20) * 2
"""
ACCELERATE = """
from accelerate import Accelerator, notebook_launcher
def train(epochs):
    from torch.utils.data import DataLoader, TensorDataset
    accelerator = Accelerator()
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x.sum(1, keepdim=True) > 0).float()
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(epochs):
        for inputs, targets in data:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = sum(each.double().sum() for each in model.parameters()).item()
    place = f"{accelerator.process_index} of {accelerator.num_processes} on {accelerator.device}"
    print(f"{place}: {losses[-1] < losses[0]} {weights}\\n", end="", flush=True)
notebook_launcher(train, (4,), num_processes=RANKS)
"""
LIGHTNING = """
import warnings
import lightning
warnings.simplefilter("ignore")
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
    def on_train_end(self):
        weights = sum(each.double().sum() for each in self.parameters()).item()
        place = f"{self.global_rank} of {self.trainer.world_size} on {self.device}"
        print(f"{place}: True {weights}\\n", end="", flush=True)
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="gpu", devices=RANKS, strategy="ddp_notebook", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
"""


@pytest.fixture
def notebook(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    with kernel() as started:
        assert not started.run(TRAIN).error
        yield started
        ran = started.run("print(net(torch.ones(1, 8, device='cuda')).shape)")
        assert ran.stdout == "torch.Size([1, 2])\n", ran.error_text
        wait_for_sessions(lambda found: len(found) == 1)


def places(lines: list[str]) -> set[str]:
    """Return what ranks say about themselves; all of them have the same weights, and learn."""
    found = [line.split(": ", 1) for line in lines if " of " in line]
    assert len({weights for _, weights in found}) == 1, lines
    assert found[0][1].startswith("True "), lines
    return {place for place, _ in found}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("launch", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_a_launcher_in_a_notebook_starts_ranks(notebook: Kernel, launch: str, ranks: int) -> None:
    ran = notebook.run(launch.replace("RANKS", str(ranks)))
    assert not ran.error, ran.error_text
    expected = {f"{rank} of {ranks} on cuda:{rank}" for rank in range(ranks)}
    assert places(ran.stdout.splitlines()) == expected


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_torch_starts_ranks_by_any_method(notebook: Kernel, method: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.programs.jobs.spawned import sum_of_ranks\n"
        f"torch.multiprocessing.start_processes(sum_of_ranks, (3, {str(tmp_path)!r}), nprocs=3,"
        f" start_method={method!r})"
    )
    ran = notebook.run(code)
    assert not ran.error, ran.error_text
    for rank in range(3):
        found = (tmp_path / f"rank-{rank}").read_text()
        assert found == repr((3.0, f"cuda:{rank}", 3, [3.0, 3.0]))


def test_torchrun_in_a_cell_runs_a_trainer(notebook: Kernel, tmp_path: Path) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    ran = notebook.run(f"!{torchrun} {PROGRAMS / 'trainer.py'} {tmp_path}/out 2> {tmp_path}/errors")
    assert not ran.error, ran.error_text
    lines = [line for line in ran.stdout.splitlines() if line.startswith("rank ")]
    assert {line.split(":")[0] for line in lines} == {
        "rank 0 of 2 on cuda", "rank 1 of 2 on cuda",
    }, (tmp_path / "errors").read_text()[-3000:]  # fmt: skip
    assert len({line.rsplit(" ", 1)[1] for line in lines}) == 1, lines
    assert (tmp_path / "out" / "checkpoint-6" / "model.safetensors").exists()


def test_ranks_of_the_command_line_train_alike(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    weights = []
    for model in ("gpt2", "fsdp2"):
        command = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, str(PROGRAMS / "ranks.py"), model, "5", "1"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        ends = [line for line in done.stdout.splitlines() if "weights" in line]
        weights += [line.split()[-1] for line in ends]
    # Two ranks add the same two numbers, in whatever pieces.
    assert len(weights) == 4, weights
    assert len(set(weights)) == 1, weights
    assert sessions() == []
