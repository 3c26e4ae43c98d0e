"""Printing."""

from __future__ import annotations

import torch

from tests.surface.checking import check


@check
def tensors_print_like_those_of_the_cpu() -> None:
    for tensor in (
        torch.arange(20000.0).reshape(100, 200),
        torch.rand(7, 5, 300),
        torch.rand(2, 2) > 0.5,
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.arange(5000),
        torch.randn(3000, dtype=torch.cfloat).conj(),
        torch.rand(2, 3, dtype=torch.float16),
    ):
        plain = repr(tensor).split()
        proxied = (
            repr(tensor.cuda()).replace(", device='cuda:0'", "").replace("device='cuda:0'", "")
        )
        assert "".join(proxied.split()).replace(",,", ",").replace(",)", ")") == "".join(plain)
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
    assert repr(parameter).startswith("Parameter containing:")
