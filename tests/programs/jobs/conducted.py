"""A rank that does what a test tells it: ``conducted.py SOCKET``, started by any launcher.

It connects to the test's socket, says which rank it is, carries out each line that it receives, and
answers with one line: the result, or the error, with which it then ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.programs.jobs.ranks import digest, prepare


class RankCommands:
    """Commands for a rank; each method is one, and takes the words after it."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self._chance = torch.Generator().manual_seed(dist.get_rank())
        self._model: torch.nn.Module | None = None

    def add(self, count: str = "1", dtype: str = "float32", op: str = "SUM") -> str:
        """Add numbers of all ranks."""
        value = torch.full((int(count),), dist.get_rank() + 1, dtype=getattr(torch, dtype)).cuda()
        dist.all_reduce(value, getattr(dist.ReduceOp, op))
        return str(value[0].item())

    def gather(self) -> str:
        """Gather a number of each rank."""
        found = [torch.zeros(1, device="cuda") for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.full((1,), float(dist.get_rank()), device="cuda"))
        return str([each.item() for each in found])

    def catch(self, command: str, *arguments: str) -> str:
        """Carry out a command that fails; answer with its error, and continue."""
        try:
            return str(getattr(self, command)(*arguments))
        except dist.DistBackendError as error:
            return str(error)

    def again(self) -> str:
        """Destroy the default group, and make it again."""
        dist.destroy_process_group()
        dist.init_process_group("nccl")
        return "again"

    def train(self, steps: str) -> str:
        """Train a model, and return the hash of its weights."""
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self._model = self._model or prepare("mlp", device)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        for _ in range(int(steps)):
            inputs = torch.randn(8, 16, generator=self._chance).to(device)
            optimizer.zero_grad()
            functional.mse_loss(self._model(inputs), inputs[:, :4]).backward()
            optimizer.step()
        return digest(self._model)

    def compute(self) -> str:
        """Compute on the device for ever."""
        value = torch.ones(100, device="cuda")
        while True:
            value = (value * 1.5).clamp(max=2.0)
            value.sum().item()

    def fail(self) -> str:
        """Raise an error of the program."""
        raise ValueError("a rank that fails")


def show_stacks(path: str) -> None:
    """Let SIGUSR2 append this process's stacks to a file, and those of its forked children."""
    file = open(f"{path}.stacks", "a")  # noqa: SIM115 - closed with the process
    faulthandler.register(signal.SIGUSR2, file)


def main(path: str) -> None:
    show_stacks(path)
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.ones(1, device="cuda").item()
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(path)
        lines = test.makefile("rw")
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(dist.get_rank(), os.environ["SING_SESSION"], restarts,
              file=lines, flush=True)  # fmt: skip
        commands = RankCommands()
        for line in lines:
            name, *arguments = line.split()
            command: Callable[..., str] = getattr(commands, name)
            try:
                print(command(*arguments), file=lines, flush=True)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=lines, flush=True)
                raise
    dist.destroy_process_group()


def spawned(rank: int, path: str, size: int, meet: str) -> None:
    """Be a rank that ``torch.multiprocessing.spawn`` has started."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meet,
    }  # fmt: skip
    main(path)


if __name__ == "__main__":
    main(sys.argv[1])
