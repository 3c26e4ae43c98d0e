"""Functions that processes run which a notebook has started by ``torch.multiprocessing``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def sum_of_ranks(rank: int, size: int, directory: str) -> None:
    """Add the numbers of all ranks, each on a device of its own; write what was found."""
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{directory}/meet", rank=rank, world_size=size
    )
    number = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(number)
    weight = torch.ones(2, device=rank, requires_grad=True)
    (weight * number).sum().backward()
    assert weight.grad is not None
    found = (number.item(), str(number.device), torch.cuda.device_count(), weight.grad.tolist())
    with open(os.path.join(directory, f"rank-{rank}"), "w") as file:
        file.write(repr(found))
    dist.destroy_process_group()
