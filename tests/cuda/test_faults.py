"""Faults of the double's cards: the session at fault reports them, and loses nothing else."""

from __future__ import annotations

import pytest

from kernelproxy.common.protocol import Suspend
from tests.doubles.cuda.cards import ASSERT, ECC, ILLEGAL_ADDRESS, Cards
from tests.e2e.kernels import Kernel, wait_for_session
from tests.e2e.trainers import verb

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: A fill with this number is the operator that fails.
BAD = 666.0
START = "import torch; x = torch.arange(6., device='cuda'); y = torch.zeros(4, device='cuda')"
INTACT = "print((x * 2).tolist())"
DOUBLED = "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ASSERT, "device-side assert triggered"),
        (ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ],
)
def test_a_fault_is_the_error_of_its_operator(
    notebook: Kernel, cards: Cards, code: int, words: str
) -> None:
    cards.fail((code, "*", f"{BAD}", "FillFunctor<float>"))
    notebook.run(START)
    ran = notebook.run(f"x.add_(1); y.fill_({BAD}); x.sub_(1); print(y.tolist())")
    assert words in ran.error_text
    assert "fill_" in ran.error_text
    ran = notebook.run(INTACT)
    assert (ran.stdout, ran.error_text) == (DOUBLED, "")
    assert 1 <= len(cards.events("fault")) <= 3


def test_a_fault_that_is_not_read_is_reported_by_the_next_read(
    notebook: Kernel, cards: Cards
) -> None:
    cards.fail((ASSERT, "*", f"{BAD}", "FillFunctor<float>"))
    notebook.run(START)
    notebook.run(f"y.fill_({BAD})")
    session = wait_for_session(lambda each: each["memory"] > 0)
    verb(Suspend(session["id"]))
    ran = notebook.run(INTACT)
    ran = notebook.run(INTACT) if ran.error else ran
    assert (ran.stdout, ran.error_text) == (DOUBLED, "")
    assert len(cards.events("fault")) <= 3


def test_a_passing_fault_costs_a_replay(notebook: Kernel, cards: Cards) -> None:
    cards.fail((ECC, "1", f"{BAD}", "FillFunctor<float>"))
    notebook.run(START)
    ran = notebook.run(f"y.fill_({BAD}); print(y[0].item())")
    assert (ran.stdout, ran.error_text) == (f"{BAD}\n", "")
    ran = notebook.run(INTACT)
    assert (ran.stdout, ran.error_text) == (DOUBLED, "")
    assert len(cards.events("context")) == 2
