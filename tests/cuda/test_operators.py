"""Programs whose operators the double's cards compute on the host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernelproxy.common.protocol import Suspend
from tests.doubles.cuda.cards import Cards
from tests.e2e.kernels import Kernel, wait_for_session
from tests.e2e.trainers import verb

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("operators")]

PROGRAM = """
import hashlib
import torch
from torch import nn
torch.manual_seed(1)
layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
          nn.Flatten(), nn.Linear(512, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 3, 16, 16, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
def digest():
    values = [each.cpu().numpy().tobytes() for each in model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()
train(5)
"""


@pytest.fixture
def expected(cards: Cards) -> str:
    """The digest of what plain torch computes on a card."""
    code = PROGRAM + "train(5); print(digest())"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_training_gives_the_weights_of_plain_torch(
    notebook: Kernel, expected: str, cards: Cards
) -> None:
    ran = notebook.run(PROGRAM + "train(5); print(digest())")
    assert (ran.stdout, ran.error_text) == (expected, "")
    assert cards.events("unsupported", "fault") == []


def test_a_training_continues_after_its_session_was_suspended(
    notebook: Kernel, expected: str
) -> None:
    assert notebook.run(PROGRAM).error_text == ""
    session = wait_for_session(lambda each: each["memory"] > 0)
    verb(Suspend(session["id"]))
    ran = notebook.run("train(5); print(digest())")
    assert (ran.stdout, ran.error_text) == (expected, "")


def test_random_numbers_follow_the_seed(notebook: Kernel) -> None:
    ran = notebook.run(
        "import torch\n"
        "def drawn():\n"
        "    torch.manual_seed(3)\n"
        "    x = torch.randn(50, device='cuda')\n"
        "    return [x, torch.rand(5, device='cuda'), torch.nn.functional.dropout(x)]\n"
        "one, two = drawn(), drawn()\n"
        "print([torch.equal(a, b) for a, b in zip(one, two)], torch.equal(one[0][:5], one[1]))"
    )
    assert (ran.stdout, ran.error_text) == ("[True, True, True] False\n", "")


def test_an_index_out_of_range_is_a_fault_of_its_operator(notebook: Kernel, cards: Cards) -> None:
    notebook.run("import torch; x = torch.arange(6., device='cuda')")
    ran = notebook.run("x[torch.tensor([2, 99], device='cuda')].sum().item()")
    assert "device-side assert triggered" in ran.error_text
    assert "aten::index" in ran.error_text
    ran = notebook.run("print((x * 2).tolist())")
    assert (ran.stdout, ran.error_text) == ("[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]\n", "")
    assert 1 <= len(cards.events("fault")) <= 3
