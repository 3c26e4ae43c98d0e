"""The collectives on tensors of the host: who sends what to whom.

All tensors are flat and contiguous. Only `tree` computes; the rest moves bytes, so each works for
all dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernelproxy.kernel.collectives.group import Call
from kernelproxy.kernel.collectives.tree import Reduction, pieces

#: Up to this size, each rank reduces everything: one exchange instead of two.
SMALL_BYTES = 32 << 10

Tensors = Sequence[torch.Tensor]


def barrier(call: Call) -> None:
    """Wait until all ranks have called."""
    for rank in call.others:
        call.send(rank)
    for rank in call.others:
        call.receive(rank, None)


def broadcast(call: Call, data: torch.Tensor, root: int) -> torch.Tensor:
    """Return the root's data, once all ranks have called.

    Programs set themselves up with what they broadcast, as DistributedDataParallel in its second
    step: a root that trained ahead of that would do so while others hold what they had before.
    """
    if call.rank == root:
        for rank in call.others:
            call.send(rank, data)
        for rank in call.others:
            call.receive(rank, None)
        return data
    call.send(root)
    return call.receive(root, data)


def all_gather(call: Call, data: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
    """Return the data of all ranks; `outputs` have their sizes."""
    return all_to_all(call, [data] * call.size, outputs)


def all_to_all(call: Call, inputs: Tensors, outputs: Tensors, stage: int = 0) -> list[torch.Tensor]:
    """Give each rank one of the inputs; return what they gave to this rank."""
    for rank in call.others:
        call.send(rank, inputs[rank], stage)
    found = [inputs[call.rank]] * call.size
    if inputs[call.rank].numel() != outputs[call.rank].numel():
        raise ValueError(f"{call.text}: what a rank sends to itself has another size than expected")
    for rank in call.others:
        found[rank] = call.receive(rank, outputs[rank], stage)
    return found


def gather(call: Call, data: torch.Tensor, outputs: Tensors, root: int) -> list[torch.Tensor]:
    """Return the data of all ranks on the root, nothing on others."""
    if call.rank != root:
        call.send(root, data)
        return []
    found = [data] * call.size
    for rank in call.others:
        found[rank] = call.receive(rank, outputs[rank])
    return found


def scatter(call: Call, inputs: Tensors, output: torch.Tensor, root: int) -> torch.Tensor:
    """Return this rank's one of the root's inputs."""
    if call.rank == root:
        for rank in call.others:
            call.send(rank, inputs[rank])
        return inputs[root]
    call.send(root)
    return call.receive(root, output)


def reduce_scatter(
    call: Call, inputs: Tensors, output: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    """Return the reduction of what all ranks gave to this rank."""
    return reduction.combine(all_to_all(call, inputs, [output] * call.size), call.rank)


def all_reduce(
    call: Call, data: torch.Tensor, reduction: Reduction, *, keeps: bool = False
) -> list[torch.Tensor]:
    """Return the reduction of the data of all ranks, in pieces.

    `data` may be overwritten, unless the caller `keeps` it.
    """
    if _small(data):
        given = all_gather(call, data, [data] * call.size)
        return [reduction.combine(given, call.rank, torch.empty_like(data) if keeps else data)]
    mine, parts = _reduce_piece(call, data, reduction, keeps=keeps)
    for rank in call.others:
        call.send(rank, mine, stage=1)
    found = [mine] * call.size
    for rank in call.others:
        found[rank] = call.receive(rank, data[parts[rank]], stage=1)
    return found


def reduce(call: Call, data: torch.Tensor, reduction: Reduction, root: int) -> torch.Tensor:
    """Return the reduction on the root, something on others; `data` may be overwritten."""
    if _small(data):
        found = gather(call, data, [data] * call.size, root)
        return reduction.combine(found, root) if found else data
    mine, parts = _reduce_piece(call, data, reduction)
    if call.rank != root:
        call.send(root, mine, stage=1)
        return data
    for rank in call.others:
        data[parts[rank]] = call.receive(rank, data[parts[rank]], stage=1)
    return data


def _small(data: torch.Tensor) -> bool:
    return data.numel() * data.element_size() <= SMALL_BYTES


def _reduce_piece(
    call: Call, data: torch.Tensor, reduction: Reduction, *, keeps: bool = False
) -> tuple[torch.Tensor, list[slice]]:
    """Reduce one piece of the data on each rank, and return this rank's.

    It is put in its place, unless the caller `keeps` its data.
    """
    parts = pieces(data.numel(), call.size)
    inputs = [data[part] for part in parts]
    mine = inputs[call.rank]
    into = call.group.empty(mine.numel(), mine.dtype) if keeps else mine
    found = reduction.combine(all_to_all(call, inputs, [mine] * call.size), call.rank, into)
    into.copy_(found)  # nothing, where it was reduced there
    return into, parts
