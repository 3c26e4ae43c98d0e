"""The package: an operator for CUDA alone that calls the extension.

Of another name than the real one, which other libraries use if it is there.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

flash_attn_2_cuda: Any = importlib.import_module("flash_attn_2_cuda")


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cuda")
def _flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = flash_attn_2_cuda.fwd(q, k, v)
    return found


@_flash_attn_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


class FlashAttnFunc(torch.autograd.Function):
    """As in the package: gradients, which the double does not compute, are wanted or not."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        found: torch.Tensor = torch.ops.flash_attn._flash_attn_forward(q, k, v)
        return found


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend; shapes are (batch, sequence, heads, width)."""
    found: torch.Tensor = FlashAttnFunc.apply(q, k, v)
    return found
