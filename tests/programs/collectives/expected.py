"""Contributions of ranks, which each rank can compute for all, and the results to expect."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
# Reductions are not defined for all of these.
MOVED = (*DTYPES, torch.complex64, torch.float8_e4m3fn, torch.uint16)

Op: Any = distributed.ReduceOp
_FUNCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Op.SUM: operator.add,
    Op.AVG: operator.add,
    Op.PRODUCT: operator.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: operator.and_,
    Op.BOR: operator.or_,
    Op.BXOR: operator.xor,
}


def ops(dtype: torch.dtype) -> list[Any]:
    """Return the reductions that are defined for a dtype."""
    found = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
    if dtype is not torch.bool:
        found.append(Op.AVG)
    if not dtype.is_floating_point:
        found += [Op.BAND, Op.BOR, Op.BXOR]
    return found


def contribution(seed: object, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank contributes to a call."""
    generator = torch.Generator().manual_seed(_seed(seed, rank))
    values = torch.randn(count, generator=generator) * 3
    return values.relu().to(dtype) if dtype in (torch.uint8, torch.uint16) else values.to(dtype)


def _seed(seed: object, rank: int) -> int:
    return functools.reduce(lambda found, each: found * 31 + ord(each), f"{seed}/{rank}", 7) % 2**31


def reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Return the reduction of all contributions, in double precision if they are not integers."""
    dtype = parts[0].dtype
    wide = [part.double() if dtype.is_floating_point else part for part in parts]
    found = functools.reduce(_FUNCTIONS[op], wide)
    if op is Op.AVG:
        rounding = None if dtype.is_floating_point else "trunc"
        found = found.div(len(parts), rounding_mode=rounding)
    return found.to(dtype)


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a result on the device is as expected: exactly, or to rounding."""
    host = found.cpu()
    if host.shape != expected.shape or host.dtype != expected.dtype:
        return False
    if host.dtype in FLOATS:
        close = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(host.dtype, 1e-5)
        return torch.allclose(host.double(), expected.double(), rtol=close, atol=close)
    return bytes_of(host) == bytes_of(expected)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor of the host."""
    return list(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if len(tensor) else []
