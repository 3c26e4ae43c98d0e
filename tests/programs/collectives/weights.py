"""Train a net with DistributedDataParallel; print each step, then a hash of the weights.

``weights.py STEPS``
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps = int(sys.argv[1])
    distributed.init_process_group(device_id=torch.device("cuda:0"))
    rank = distributed.get_rank()
    torch.manual_seed(rank)  # rank 0's weights become those of all
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 400),
        torch.nn.BatchNorm1d(400),
        torch.nn.ReLU(),
        torch.nn.Linear(400, 10),
    ).cuda()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(100 + rank)
    for number in range(steps):
        images = torch.randn(32, 32, generator=generator).cuda()
        labels = torch.randint(0, 10, (32,), generator=generator).cuda()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        print(f"step {number}", flush=True)
    digest = hashlib.sha256()
    for weights in net.parameters():
        digest.update(weights.detach().cpu().numpy().tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
