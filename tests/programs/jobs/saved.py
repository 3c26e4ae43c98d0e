"""Functions of processes of a notebook, which are saved with it in the middle of their work."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.programs.jobs.models import MODELS
from tests.programs.jobs.ranks import digest, prepare

#: Between two steps, so that there is time to save the job.
PAUSE_SECONDS = 0.02


def say(directory: str, name: str, text: str) -> None:
    """Replace the content of a file."""
    path = Path(directory, name)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def may_end(directory: str) -> bool:
    """Return whether there is the file that lets processes end."""
    return Path(directory, "go").exists()


def alone(rank: int, directory: str, steps: int) -> None:
    """Change a tensor of the device repeatedly; write its hash at the end, when it may end."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    value = torch.randn(64, 64, device="cuda")
    for step in range(steps):
        value = torch.tanh(value @ torch.rand(64, 64, device="cuda"))
        say(directory, f"step-{rank}", str(step))
        time.sleep(PAUSE_SECONDS)
        while step == steps // 2 and not may_end(directory):
            assert torch.ones(3, device="cuda").sum().item() == 3
    bits = value.cpu().numpy().tobytes()
    say(directory, f"found-{rank}", hashlib.sha256(bits).hexdigest())


def use_later(rank: int, directory: str) -> None:
    """Use the device as soon as there is one file, and end when there is another."""
    torch.set_num_threads(1)
    say(directory, f"step-{rank}", "0")
    while not may_end(directory):
        time.sleep(PAUSE_SECONDS)
    assert torch.ones(3, device="cuda").sum().item() == 3
    while not Path(directory, "end").exists():
        time.sleep(PAUSE_SECONDS)


def wait_for_the_last(rank: int, size: int, directory: str) -> None:
    """Add large tensors of all ranks; the last one waits for a file before."""
    torch.set_num_threads(1)
    meet = f"file://{directory}/meet-the-last"
    dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=size)
    torch.manual_seed(rank)
    value = torch.randn(1 << 16, device="cuda")
    dist.all_reduce(value)
    say(directory, f"step-{rank}", "0")
    while rank == size - 1 and not may_end(directory):
        time.sleep(PAUSE_SECONDS)
    for _ in range(3):
        dist.all_reduce(value)
    bits = value.cpu().numpy().tobytes()
    with Path(directory, f"found-{rank}").open("a") as file:
        file.write(f"{hashlib.sha256(bits).hexdigest()}\n")
    dist.destroy_process_group()


def all_may_end(directory: str, device: torch.device) -> bool:
    """Return whether all ranks may end; called by all."""
    found = torch.tensor(int(may_end(directory)), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def train(rank: int, size: int, directory: str, steps: int, model: str, meet: str) -> None:
    """Train a model with all ranks; write the hash of the weights at the end, as in `alone`."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=size)
    torch.manual_seed(1 + rank)
    chance = torch.Generator().manual_seed(1000 + rank)
    network = prepare(model, device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = (each.to(device) for each in MODELS[model][1](chance))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
        say(directory, f"step-{rank}", str(step))
        time.sleep(PAUSE_SECONDS)
        while step == steps // 2 and not all_may_end(directory, device):
            pass
    say(directory, f"found-{rank}", digest(network))
    dist.destroy_process_group()


if __name__ == "__main__":
    alone(0, sys.argv[1], int(sys.argv[2]))
