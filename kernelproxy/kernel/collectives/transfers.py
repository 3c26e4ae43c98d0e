"""Reads and uploads of collectives, with names for equal results.

Note [Names]. The ranks of a job that are on one simulated device hold equal bytes once, and the
device finds what is equal by hashing what is uploaded. The result of a collective is known to be
equal without that: it has a name, which is the same on all ranks that receive it and is given to
nothing else. What a rank contributes has one, too; so the root of a broadcast shares its tensor
with those that receive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernelproxy.kernel.activation import state
from kernelproxy.kernel.collectives.group import Group, Name
from kernelproxy.kernel.collectives.transport.outbox import SHARED_BYTES_MIN

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def read(
    own: Group,
    tensors: Tensors,
    name: Callable[[int], Name | None] | None = None,
    *,
    last: bool = False,
) -> Tensor:
    """Return the elements of device tensors, flat, one after the other, in memory for sending.

    Parameters
    ----------
    own : Group
        In which they are sent.
    tensors : sequence of Tensor
        All of one dtype.
    name : callable
        Returns the name of each.
    last : bool
        Whether those with a name need no memory of the device until they are replaced.
    """
    elements = own.empty(sum(tensor.numel() for tensor in tensors), tensors[0].dtype)
    parts = cut(elements, [tensor.numel() for tensor in tensors])
    for i, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
        _copy(part.view(tensor.shape), tensor.data, name and name(i), tensor, last=last)
    return elements


def write(tensor: Tensor, elements: Tensor | Tensors, name: Name | None = None) -> None:
    """Replace a device tensor's elements, which may come in pieces; their name is given."""
    # As NCCL writes: autograd does not notice.
    into = tensor.data
    if isinstance(elements, Tensor):
        elements = [elements]
    if len(elements) > 1 and not into.is_contiguous():
        elements = [torch.cat(list(elements))]
    if len(elements) == 1:
        _copy(into, elements[0].view(tensor.shape), name, tensor)
        return
    parts = cut(into.view(-1), [len(each) for each in elements])
    for part, each in zip(parts, elements, strict=True):
        _copy(part, each, name, tensor)


def _copy(
    to: Tensor, source: Tensor, name: Name | None, tensor: Tensor, *, last: bool = False
) -> None:
    """Copy to or from a tensor of the device, or a part of it."""
    # Names are those of whole storages; small ones are hashed as fast.
    whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    if name is None or tensor.nbytes < SHARED_BYTES_MIN or not whole:
        to.copy_(source)
    else:
        state.copy_named(to, source, name, last=last)


def cut(elements: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut a flat tensor into parts of these numbers of elements."""
    return list(torch.split_with_sizes(elements, list(sizes)))


def joined(parts: Tensors) -> Tensor:
    """Join flat tensors."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def like(dtype: torch.dtype, count: int) -> Tensor:
    """Return a tensor that only has a dtype and a size."""
    return torch.empty(count, dtype=dtype, device="meta")
