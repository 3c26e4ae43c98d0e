"""Unsupported calls: they raise at once or at the next synchronization, without side effects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from tests.behaviours.comparison import behaviour, normal, refusal, whole


def refused(device: str, function: Callable[[torch.Tensor], object]) -> tuple[str, float]:
    """Return the name of the exception that a function raises; use its operand afterwards."""
    x = torch.ones(3, 3, device=device)

    def looked_at() -> None:
        found = function(x)
        if isinstance(found, torch.Tensor):
            found.sum().item()

    return refusal(looked_at), x.sum().item()


@behaviour
def sizes_that_do_not_fit(device: str) -> object:
    other = torch.ones(2, 2, device=device)
    return [
        refused(device, function)
        for function in (
            lambda x: x @ other,
            lambda x: x + other,
            lambda x: x.view(4, 4),
            lambda x: torch.cat([x, other]),
            lambda x: functional.conv2d(x, other),
            lambda x: functional.linear(x, other),
            lambda x: torch.empty(-1, device=device),
            lambda x: x.reshape(2, -1),
            lambda x: x.expand(2, 2),
        )
    ]


@behaviour
def indices_out_of_range(device: str) -> object:
    nine = torch.tensor([9], device=device)
    return [
        refused(device, function)
        for function in (
            lambda x: x[5],
            lambda x: x[nine],
            lambda x: functional.embedding(nine, x),
            lambda x: x.index_select(0, nine),
            lambda x: x.gather(0, nine[None]),
            lambda x: functional.nll_loss(x, torch.tensor([1, 2, 7], device=device)),
            lambda x: x.sum(4),
            lambda x: x.index_fill_(5, nine, 1),
            lambda x: x[0, 0, 0],
        )
    ]


@behaviour
def values_that_do_not_fit(device: str) -> object:
    return [
        refused(device, function)
        for function in (
            lambda x: torch.linalg.cholesky(-x),
            lambda x: torch.linalg.inv(x),
            lambda x: torch.multinomial(-x, 1),
            lambda x: torch.bincount(whole(device, 3, below=3) - 5),
            lambda x: x.item(),
            lambda x: bool(x),
            lambda x: x.long().requires_grad_(),
            lambda x: x.backward(),
            lambda x: x.quantile(3.0),
            lambda x: functional.dropout(x, 2.0),
        )
    ]


@behaviour
def types_that_do_not_fit(device: str) -> object:
    return [
        refused(device, function)
        for function in (
            lambda x: x.long() @ x,
            lambda x: functional.embedding(x, x),
            lambda x: x & x,
            lambda x: x.bool() - x.bool(),
            lambda x: functional.cross_entropy(x, x.int()[0]),
            lambda x: x.long().mean(),
            lambda x: torch.complex(x, x.double()),
            lambda x: x.add_(1j),
            lambda x: torch.tensor(["text"], device=device),
        )
    ]


@behaviour
def errors_that_do_not_wait_for_a_look(device: str) -> object:
    x = torch.ones(3, 3, device=device)
    return [
        refusal(function)
        for _ in range(2)  # the second time nothing is new
        for function in (
            lambda: x & x,
            lambda: functional.gelu(x, approximate="other"),
            lambda: torch.randint(5, 5, (2,), device=device),
            lambda: torch.empty(2, device=device).uniform_(3, 1),
            lambda: x.clone().normal_(0, -1),
            lambda: x.long().normal_(),
            lambda: torch.empty(2, device=device).bernoulli_(1.5),
            lambda: x.clone().fill_(torch.ones(2, device=device)),
        )
    ]


@behaviour
def errors_of_types_that_go_well_where_there_are_no_elements(device: str) -> object:
    def log_softmax(size: int) -> torch.Tensor:
        return torch.zeros(size, 3, dtype=torch.complex64, device=device).log_softmax(0)

    return [refusal(partial(log_softmax, size)) for size in (0, 2, 0, 2)]


@behaviour
def copies_onto_themselves(device: str) -> object:
    x = torch.arange(6.0, device=device)
    return [
        refusal(function)
        for function in (
            lambda: x[1:].copy_(x[:-1]),
            lambda: x[:3].copy_(x[:1]),
            lambda: x[:1].expand(3).copy_(x[3:]),
            lambda: x[:1].expand(3).copy_(torch.ones(3)),
            lambda: x[:3].copy_(x[3:]),
            lambda: x.copy_(x.view(6)),
        )
    ], x


@behaviour
def a_failure_does_not_lose_what_has_no_elements(device: str) -> object:
    empty = torch.zeros(1, 0, 3).to(device)
    mask = torch.ones(2, 2, dtype=torch.bool, device=device)
    return refusal(lambda: empty.masked_fill_(mask, 1)), empty + 1, empty.sum()


@behaviour
def a_failure_does_not_spread(device: str) -> object:
    x = normal(device, 5, 7)
    before = (x * 2).sum()
    refused(device, lambda y: y[torch.tensor([9], device=device)])
    return before, x.sum(), x @ x.T
