"""One rank of a job that trains an MLP: ``rank.py DEVICE STEPS [WIDTH]``.

Started as torchrun starts it, with DistributedDataParallel; with a width, gradients are views of
its buckets. Rank 0 prints the seconds of one step, counts, and bytes, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

WARM_STEPS = 5
WIDTH = 1024


def main(kind: str, steps: int, width: int = WIDTH, *, views: bool = False) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = (
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip
    net = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers).to(device), gradient_as_bucket_view=views
    )
    optimizer = torch.optim.AdamW(net.parameters())
    inputs = torch.randn(256, 256, device=device)
    targets = torch.randint(10, (256,), device=device)

    def train(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
        loss.item()
        return (time.perf_counter() - begin) / count

    train(WARM_STEPS)
    before = operators()
    optimizer.step()
    calls = operators() - before
    dist.barrier()
    seconds = train(steps)
    if rank == 0:
        # Operators of the optimizer in a step, and how often it was called.
        found = {"step": seconds, "calls": calls, "steps": WARM_STEPS + 1 + steps}
        found["parameters"] = sum(each.nbytes for each in net.parameters())
        # Inputs, both layers before and after the activation, and outputs.
        found["activations"] = len(inputs) * (256 + 4 * width + 10) * inputs.itemsize
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def operators() -> int:
    """Return the number of operators that were sent to the device; 0 with plain torch."""
    activation = sys.modules.get("kernelproxy.kernel.activation")
    client = activation.current().client if activation else None
    return int(client.statistics()["operators"]) if client else 0


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[2:]]
    main(sys.argv[1], *given, views=len(given) > 1)
