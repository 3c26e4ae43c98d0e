"""Comparison of the kernels of the CUDA double with the host: prints what differs."""

from __future__ import annotations

from collections.abc import Callable

import torch

TYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
]  # fmt: skip
Function = Callable[[torch.Tensor], torch.Tensor]


def conversions(other: torch.dtype) -> dict[str, Function]:
    """Return functions that convert to a type."""
    return {
        f"to {other}": lambda x: x.to(other),
        f"strided to {other}": lambda x: x.transpose(0, 1).to(other),
    }


def functions(dtype: torch.dtype) -> dict[str, Function]:
    """Return functions of a tensor of three dimensions."""
    found: dict[str, Function] = {
        "fill": lambda x: x.clone().fill_(3),
        "fill strided": lambda x: x.clone()[:, ::2].fill_(3).contiguous(),
        "transposed": lambda x: x.transpose(0, 2).contiguous(),
        "expanded": lambda x: x[0].expand(4, *x.shape[1:]).contiguous(),
        "equal": lambda x: x == 2,
        "not equal": lambda x: x != x[0],
        "any": lambda x: (x == 3).any(1),
        "all": lambda x: (x == x).all(),
        "joined": lambda x: torch.cat([x, x[:2], x[:0]], 0),
        "joined inside": lambda x: torch.cat([x, x[:, :1]], 1),
        "joined strided": lambda x: torch.cat([x.transpose(0, 2), x.transpose(0, 2)[:, :2]], 1),
        "joined in vectors": lambda x: torch.cat([x.reshape(-1)[:32]] * 150),
        "joined in rows": lambda x: torch.cat([x.reshape(-1)[:48].view(3, 16)] * 2, 1),
    }
    for other in TYPES:
        found |= conversions(other)
    if dtype != torch.bool:
        found |= {
            "add": lambda x: x + x,
            "add a number": lambda x: x + 2,
            "subtract from a number": lambda x: 2 - x,
            "broadcast": lambda x: x - x[0],
            "multiply": lambda x: x * x[0],
            "multiply by a number": lambda x: x * 3,
            "negate": lambda x: -x,
            "largest": lambda x: x.amax(1),
            "smallest": lambda x: x.amin(),
            "sum": lambda x: x.sum(),
            "sums": lambda x: x.sum((0, 2)),
        }
    if dtype not in (torch.bool, torch.float16, torch.bfloat16):
        found["range"] = lambda x: torch.arange(1, 9, 2, dtype=dtype, device=x.device)
    if dtype.is_floating_point:
        found |= {
            "divide": lambda x: x / (x * x + 1),
            "mean": lambda x: x[:, :, :4].mean(2),
            "root": lambda x: (x * x).sqrt(),
        }
    return found


def main() -> None:
    torch.manual_seed(1)
    for dtype in TYPES:
        x = torch.randint(0, 9, (3, 4, 5)).to(dtype)
        for name, function in functions(dtype).items():
            expected = function(x)
            found = function(x.to("cuda")).cpu()
            if found.dtype != expected.dtype or not torch.equal(found, expected):
                print(f"{name} of {dtype}: {found} is not {expected}")
    y = torch.arange(200_000.0) % 7
    if y.to("cuda").view(400, 500).sum(0).cpu().tolist() != y.view(400, 500).sum(0).tolist():
        print("large sums")
    print("done")


if __name__ == "__main__":
    main()
