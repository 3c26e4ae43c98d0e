"""Sessions on the double's cards: what they compute, and how they leave a card and return."""

from __future__ import annotations

import pytest

from kernelproxy.common.protocol import MigrateRequest, Resume, Suspend
from tests.cuda.conftest import GIB
from tests.doubles.cuda.cards import Cards
from tests.e2e.kernels import Kernel, wait_for_session
from tests.e2e.trainers import verb

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Copies in all ways, fills, conversions and arithmetic that the double knows; as a checksum.
PROGRAM = """
import torch
def program(device):
    torch.manual_seed(1)
    host = torch.randn(300, 200)
    x = host.clone().to(device)
    whole = torch.arange(1000, device=device)
    y = x.t().contiguous() + 1
    y[::2].fill_(-3)
    halves = y.half().float()
    x.copy_(halves.t())
    x[5:7] = host[:2].to(device)
    pinned = host.pin_memory() if device == 'cuda' else host
    z = torch.empty_like(x)
    z.copy_(pinned, non_blocking=True)
    return [x.cpu(), y.cpu(), (x * 2 - z).cpu(), (whole * 3).cpu(), whole[7].item()]
def same(a, b):
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b))
"""
LARGE = 256 << 20


def test_copies_and_fills_are_those_of_the_host(notebook: Kernel, cards: Cards) -> None:
    ran = notebook.run(PROGRAM + "print(same(program('cuda'), program('cpu')))")
    assert (ran.stdout, ran.error_text) == ("True\n", "")
    assert cards.launches(0) > 5
    assert cards.events("unsupported", "fault") == []


def test_a_suspended_session_leaves_its_card_and_returns(notebook: Kernel, cards: Cards) -> None:
    notebook.run(PROGRAM + f"x = torch.arange({LARGE} // 8, device='cuda'); small = x[:5] * 2")
    session = wait_for_session(lambda each: each["state"] == "running" or each["memory"] > 0)
    assert cards.nvml()[0].used >= LARGE + cards.context
    assert verb(Suspend(session["id"]))["state"] == "suspended"
    assert cards.nvml()[0].used == 0
    verb(Resume(session["id"]))
    ran = notebook.run(
        f"print(small.tolist(), x[-1].item(), torch.equal(x.cpu(), torch.arange({LARGE} // 8)))"
    )
    assert (ran.stdout, ran.error_text) == (f"[0, 2, 4, 6, 8] {LARGE // 8 - 1} True\n", "")
    assert len(cards.events("context")) == 2


def test_a_session_migrates_between_cards(notebook: Kernel, cards: Cards) -> None:
    notebook.run("import torch; x = torch.arange(1 << 20, device='cuda'); x[0] = 7")
    session = wait_for_session(lambda each: each["memory"] > 0)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        moved = verb(MigrateRequest(session["id"], device))
        assert moved["device"] == device
        notebook.run("x = x + 1")
    ran = notebook.run("print(x[0].item(), x[-1].item())")
    assert (ran.stdout, ran.error_text) == (f"10 {(1 << 20) + 2}\n", "")
    used = [each.used for each in cards.nvml()]
    assert used[0] == 0
    assert used[1] >= (8 << 20) + cards.context
    assert [each.details for each in cards.events("context")] == ["0", "1", "0", "1"]


def test_a_migration_executes_nothing_again(notebook: Kernel, cards: Cards) -> None:
    notebook.run("import torch; x = torch.arange(1 << 20, device='cuda')")
    notebook.run("for _ in range(50): x += 1")
    session = wait_for_session(lambda each: each["memory"] > 0)
    assert notebook.run("print(x[0].item())").stdout == "50\n"
    executed = cards.launches(0)
    assert executed >= 50
    verb(MigrateRequest(session["id"], "cuda:1"))
    ran = notebook.run("print(x[0].item(), x[-1].item())")
    assert (ran.stdout, ran.error_text) == (f"50 {(1 << 20) + 49}\n", "")
    assert (cards.launches(0), cards.launches(1)) == (executed, 0)


def test_more_memory_than_the_card_has_is_an_error_of_that_cell(notebook: Kernel) -> None:
    notebook.run("import torch; x = torch.arange(5, device='cuda')")
    ran = notebook.run(f"y = torch.empty({5 * GIB}, dtype=torch.uint8, device='cuda')")
    assert ran.error == "OutOfMemoryError"
    ran = notebook.run("print((x + 1).tolist())")
    assert (ran.stdout, ran.error_text) == ("[1, 2, 3, 4, 5]\n", "")
