"""A kernel that is written in Triton. Triton reads its source, so it is a module of its own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x: Any, y: Any, out: Any, count: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors of the same shape."""
    out = torch.empty_like(x)
    _kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), block=256)
    return out
