"""Reductions in the canonical order: a balanced binary tree over ranks, in the order of ranks.

Sums of floating-point numbers depend on their order. Here the order depends only on the number of
ranks: not on devices or hosts, and, as it is the same for each element, not on how a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_BITWISE = ("BAND", "BOR", "BXOR")
_ORDERED = ("MIN", "MAX")
#: NCCL's numbering, as ``ReduceOp.op()`` gives it.
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

#: Left, right, and where the result goes, which may be one of them.
Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_COMBINE: dict[str, Combine] = {
    "SUM": lambda left, right, out: torch.add(left, right, out=out),
    "PRODUCT": lambda left, right, out: torch.mul(left, right, out=out),
    "MIN": lambda left, right, out: torch.minimum(left, right, out=out),
    "MAX": lambda left, right, out: torch.maximum(left, right, out=out),
    "BAND": lambda left, right, out: torch.bitwise_and(left, right, out=out),
    "BOR": lambda left, right, out: torch.bitwise_or(left, right, out=out),
    "BXOR": lambda left, right, out: torch.bitwise_xor(left, right, out=out),
}
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
_ARITHMETIC = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    *_FLOAT8,
)
#: As NCCL's.
_MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Reduction:
    """A reduction of the contributions of all ranks.

    Parameters
    ----------
    name : str
        One of `OPERATIONS`.
    factor : float
        Of PREMUL_SUM: each rank multiplies its contribution by its own one.
    """

    name: str
    factor: float = 1.0

    def problem(self, dtype: torch.dtype) -> str | None:
        """Return why the reduction is not defined for a dtype, or None."""
        found = None
        if dtype not in _ARITHMETIC:
            found = f"tensors of {dtype} cannot be reduced"
        elif self.name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
            found = f"ReduceOp.{self.name} needs integers, not {dtype}"
        elif self.name in _ORDERED and dtype.is_complex:
            found = f"ReduceOp.{self.name} is not defined for {dtype}"
        elif self.name == "AVG" and dtype is torch.bool:
            found = f"ReduceOp.AVG is not defined for {dtype}"
        elif self.name == "PREMUL_SUM" and dtype not in _MULTIPLIED:
            found = f"ReduceOp.PREMUL_SUM is not defined for {dtype}"
        return found

    def contribution(self, own: torch.Tensor) -> torch.Tensor:
        """Return what a rank contributes that has these numbers; they may be overwritten."""
        return own.mul_(self.factor) if self.name == "PREMUL_SUM" else own

    def combine(
        self, parts: Sequence[torch.Tensor], mine: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduce one tensor of each rank, in the order of ranks.

        Only `into` may be overwritten, or `mine` without it: the others may be memory of their
        ranks.
        """
        combine = _COMBINE["SUM" if self.name in ("AVG", "PREMUL_SUM") else self.name]
        if parts[0].dtype in _FLOAT8:
            combine = _rounded(combine)
        found = _node(combine, parts, mine, parts[mine] if into is None else into)
        return self._average(found, len(parts)) if self.name == "AVG" else found

    @staticmethod
    def _average(total: torch.Tensor, count: int) -> torch.Tensor:
        if total.dtype in _FLOAT8:
            return (total.float() / count).to(total.dtype)
        if total.dtype.is_floating_point or total.dtype.is_complex:
            return total.div_(count)
        return total.div_(count, rounding_mode="trunc")  # as NCCL


def _node(
    combine: Combine, parts: Sequence[torch.Tensor], mine: int, into: torch.Tensor
) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    middle = split(len(parts))
    left = _node(combine, parts[:middle], mine, into)
    right = _node(combine, parts[middle:], mine - middle, into)
    if middle > 1:
        out = left
    elif mine == 0:
        out = into
    elif len(parts) - middle > 1:
        out = right
    elif mine == middle:
        out = into
    else:
        out = torch.empty_like(left)
    return combine(left, right, out)


def split(count: int) -> int:
    """Return how many of `count` > 1 ranks are on the left: the largest power of two below."""
    return 1 << ((count - 1).bit_length() - 1)


def _rounded(combine: Combine) -> Combine:
    """Combine numbers that the CPU cannot add; each result is rounded to their dtype."""

    def rounded(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        wide = left.float()
        return out.copy_(combine(wide, right.float(), wide).to(left.dtype))

    return rounded


def pieces(count: int, ranks: int) -> list[slice]:
    """Cut `count` elements into one piece for each rank, of nearly equal size."""
    # Multiples of 64 elements: pieces begin at cache lines, and vector loops have few remainders.
    step = -(-count // ranks)
    step = -(-step // 64) * 64
    return [slice(min(r * step, count), min((r + 1) * step, count)) for r in range(ranks)]
