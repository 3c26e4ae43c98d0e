"""Operators are looked up once, however their operands are passed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernelproxy.kernel.activation import current
from tests.surface.checking import check, refused


@check
def what_is_known_is_found_at_once() -> None:
    x, y, z = (torch.rand(3, 3, device="cuda") for _ in range(3))
    rows = torch.tensor([0, 2], device="cuda")
    calls = {
        "a tensor": lambda: torch.relu(x),
        "two": lambda: x * y,
        "two, one is a number": lambda: x * 2.0,
        "three": lambda: torch.where(x > 0.5, y, z),
        "a number": lambda: x > 0.5,
        "a number first": lambda: torch.pow(2.0, x),
        "two and a number": lambda: x + y,
        "two numbers": lambda: F.threshold(x, 0.5, 0.0),
        "three and a number": lambda: torch.addcmul(x, y, z),
        "three and two numbers": lambda: torch.addmm(x, y, z),
        "a dimension": lambda: torch.cumsum(x, 0),
        "an upper triangle": lambda: torch.triu(x, 1),
        "a dimension, and yes or no": lambda: torch.softmax(x, 0),
        "a dimension between": lambda: torch.index_select(x, 0, rows),
        "an embedding": lambda: F.embedding(rows, x),
        "a list": lambda: torch.cat([x, y], 1),
        "in place": lambda: torch.relu_(z),
        "in place, another": lambda: z.mul_(y),
        "in place, a number": lambda: z.eq_(0.5),
        "in place, another and a number": lambda: z.add_(y, alpha=2),
        "in place, two others and a number": lambda: z.addcmul_(x, y),
        "several results": lambda: F.layer_norm(x, (3,), y[0], y[1]),
        "a list of dimensions": lambda: x.sum((0, 1)),
        "a dtype": lambda: torch.empty_like(x),
    }
    client = current().client
    assert client is not None
    for name, call in calls.items():
        for _ in range(3):
            call()
        before = client.statistics()
        call()
        after = client.statistics()
        found = {key: after[key] - before[key] for key in ("cache_misses", "requests")}
        assert found == {"cache_misses": 0, "requests": 0}, (name, found)


@check
def operands_on_the_host_are_told_from_numbers() -> None:
    x, host = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
    for _ in range(3):
        assert (x + torch.tensor(2.0)).sum().item() == 12
        assert (x * 3).sum().item() == 12
        for call in (
            lambda: x + host,
            lambda: torch.mm(x, host),
            lambda: torch.cat([x, host]),
            lambda: x.clone().mul_(host),
            lambda: torch.where(x > 0, x, host),
            lambda: torch.addmm(x, x, host),
        ):
            assert "same device" in refused(call)
