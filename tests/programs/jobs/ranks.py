"""Train a model with several ranks: ``ranks.py MODEL STEPS SEED [PACE]``, as torchrun starts it.

Each rank prints the number of each step that is done, and at the end the hash of its weights. The
ranks have data of their own; they begin with the weights of rank 0. PACE is a named pipe from which
rank 0 reads a byte after every `STEPS_TOGETHER` steps.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.programs.jobs.models import MODELS

STEPS_TOGETHER = 5


def prepare(name: str, device: torch.device) -> nn.Module:
    model = MODELS[name][0]().to(device)
    if name != "fsdp2":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    assert isinstance(model.blocks, nn.ModuleList)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def digest(model: nn.Module) -> str:
    bits = hashlib.sha256()
    for value in model.parameters():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        bits.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()[:16]


def say(line: str) -> None:
    """Print a line at once: other ranks write to the same pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main(name: str, steps: int, seed: int, pace: str = "") -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(seed + rank)
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    model = prepare(name, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    signal = os.open(pace, os.O_RDONLY) if pace and rank == 0 else None
    for step in range(steps):
        inputs, targets = (each.to(device) for each in MODELS[name][1](chance))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        torch.cuda.synchronize()
        say(f"rank {rank} step {step}")
        if signal is not None and (step + 1) % STEPS_TOGETHER == 0:
            os.read(signal, 1)
    say(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
