"""One rank of a job whose number of devices changes: ``resized.py MIB FILE``.

Started as torchrun starts it. Parameters and the optimizer's state take so many MiB on each rank,
and change in each step. Rank 0 prints when each step ended; the job ends once the file exists.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 1024
#: Bytes of a parameter and of its two moments.
PARAMETER_BYTES = 12


def main(mib: int, file: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    # Only the small part has gradients of the job: the exchange is not what is measured.
    net = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 16).to(device))
    weight = nn.Parameter(
        torch.randn(mib * (1 << 20) // PARAMETER_BYTES // WIDTH, WIDTH).to(device)
    )
    weight.grad = torch.empty_like(weight)
    optimizer = torch.optim.AdamW([weight, *net.parameters()])
    inputs = torch.randn(8, WIDTH, device=device)
    enough = torch.zeros((), device=device)
    while enough.item() == 0:
        optimizer.zero_grad(set_to_none=False)
        weight.grad.fill_(1e-3)
        net(inputs).square().mean().backward()
        optimizer.step()
        enough.fill_(os.path.exists(file))
        dist.all_reduce(enough)
        if rank == 0:
            print(f"step {time.monotonic()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
