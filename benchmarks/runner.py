"""One side of a paired measurement: executes orders, such as to train, and reports the times.

Reads orders as lines of JSON and answers each with one, so that two runners, one on the CPU and
one on the proxied device, can take turns within seconds of each other:

    {"do": "train", "program": "mlp", "steps": 10}   -> {"seconds": 0.1}
    {"do": "steps", "program": "mlp", "steps": 10}   -> {"steps": [[1.0, 1.1], ...]}
    {"do": "touch"}                                  -> {"seconds": 0.1}
    {"do": "forget"}                                 -> {}        drop all tensors
    {"do": "rewrite"}                                -> {}        write all, with what they have
    {"do": "hold", "bytes": 1073741824}              -> {"sum": 0.5}
    {"do": "check"}                                  -> {"sum": 0.5}
    {"do": "reach"}                                  -> {"sum": 0.5}  an element of each
    {"do": "sum"}                                    -> {"sum": 0.5}
    {"do": "threads"}                                -> {"threads": 2}
    {"do": "operators"}                              -> {"operators": ["add", ...]}
    {"do": "issue", "operator": "add", "count": 9}   -> {"seconds": 0.1}
    {"do": "scalars", "count": 10}                   -> {"median": 1.0, ...}  microseconds
    {"do": "trips"}                                  -> {"item": 1, ...}
    {"do": "pid"}                                    -> {"pid": 123}
    {"do": "cell", "change": -1}                     -> {}        as between a notebook's cells
    {"do": "count", "program": "mlp", "steps": 10}   -> {"seconds": 0.1, "operators": 100, ...}
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import libraries, programs, small, workloads
from benchmarks.small import Operator
from kernelproxy.kernel import activation

PROGRAMS = {
    **workloads.PROGRAMS, **libraries.PROGRAMS, "large": programs.large, "frozen": programs.frozen,
    "experts": programs.experts, "routed": programs.routed,
}  # fmt: skip
BLOCKS = 16


class Runner:
    """Keeps programs and tensors between orders.

    Parameters
    ----------
    device : str
        `cpu` or `cuda`.
    small : bool
        Tiny models, for tests.
    log_every : int
        Number of steps after which the loss is read, as in training loops.
    """

    def __init__(self, device: str, small: bool, log_every: int) -> None:
        self.device, self.small, self.log_every = device, small, log_every
        self.steps: dict[str, programs.Step] = {}
        self.held: list[torch.Tensor] = []
        self.touched: torch.Tensor | None = None
        self.operators: dict[str, Operator] = {}

    def train(self, program: str, steps: int) -> dict[str, Any]:
        """Run some steps; the measured time ends when the device has finished."""
        if program not in self.steps:
            self.steps[program] = PROGRAMS[program](self.device, self.small)
        step = self.steps[program]
        begin = time.perf_counter()
        for index in range(1, steps + 1):
            loss = step()
            if index % self.log_every == 0:
                loss.item()
        self._synchronize()
        return {"seconds": time.perf_counter() - begin}

    def each(self, program: str, steps: int, wait: float = 0.0) -> dict[str, Any]:
        """Run some steps, each to its end; return their start and end by the monotonic clock.

        After each step it waits for `wait` seconds.
        """
        if program not in self.steps:
            self.steps[program] = PROGRAMS[program](self.device, self.small)
        step, moments = self.steps[program], []
        for _ in range(steps):
            begin = time.monotonic()
            step().item()
            moments.append([begin, time.monotonic()])
            time.sleep(wait)
        return {"steps": moments}

    def touch(self) -> dict[str, Any]:
        """Use a few bytes of the held data, and wait for the result."""
        if self.touched is None:
            self.touched = torch.ones(16, device=self.device)
        begin = time.perf_counter()
        (self.touched + 1).sum().item()
        return {"seconds": time.perf_counter() - begin}

    def forget(self) -> dict[str, Any]:
        """Drop all programs and held data."""
        self.steps.clear()
        self.held.clear()
        gc.collect()
        return {}

    def rewrite(self) -> dict[str, Any]:
        """Write to every tensor of the process without changing a bit, and wait for that."""
        with torch.no_grad():
            for each in gc.get_objects():
                if type(each) in (torch.Tensor, torch.nn.Parameter):
                    gradient = each.grad if each.is_leaf else None
                    for tensor in (each, gradient):
                        if tensor is None or tensor.dtype == torch.bool:
                            continue
                        if tensor.device.type == self.device:
                            tensor.mul_(1)
        self._synchronize()
        return {}

    def hold(self, bytes: int, seed: int = 3) -> dict[str, Any]:
        """Fill device memory with random numbers, which do not compress."""
        torch.manual_seed(seed)
        count = bytes // 4 // BLOCKS
        self.held = [torch.rand(count, device=self.device) for _ in range(BLOCKS)]
        return self.check()

    def check(self) -> dict[str, Any]:
        """Return the sum of the held data."""
        return {"sum": math.fsum(block.double().mean().item() for block in self.held)}

    def reach(self) -> dict[str, Any]:
        """Use an element of each held block, which must be loaded as a whole for that."""
        return {"sum": torch.stack([block[0] for block in self.held]).sum().item()}

    def sum(self) -> dict[str, Any]:
        """Sum up the held data as fast as it can be read."""
        return {"sum": torch.stack([block.sum() for block in self.held]).sum().item()}

    def threads(self) -> dict[str, Any]:
        """Return the number of compute threads of this process."""
        return {"threads": torch.get_num_threads()}

    def list_operators(self) -> dict[str, Any]:
        """Make the small operators, and return their names."""
        self.operators = small.operators(self.device)
        return {"operators": list(self.operators)}

    def issue(self, operator: str, count: int) -> dict[str, Any]:
        """Issue a small operator `count` times, and then wait for the device."""
        if not self.operators:
            self.list_operators()
        begin = time.perf_counter()
        seconds = small.issue(self.operators[operator], count)
        self._synchronize()
        return {"seconds": seconds, "completed": time.perf_counter() - begin}

    def scalars(self, count: int) -> dict[str, Any]:
        """Read `count` numbers, one after the other."""
        return small.read_scalars(self.device, count)

    def trips(self) -> dict[str, Any]:
        """Count round trips to the worker; only for a proxied device."""
        return small.count_trips(self.device, lambda: self._statistics()["requests"])

    def count(self, program: str, steps: int) -> dict[str, Any]:
        """Train, and return time and counts of records; only for a proxied device."""
        before, cpu = self._statistics(), time.process_time()
        found = self.train(program, steps)
        found["cpu_seconds"] = time.process_time() - cpu
        after = self._statistics()
        return found | {name: after[name] - before[name] for name in after}

    def cell(self, change: int) -> dict[str, Any]:
        """Report that a cell has begun or ended."""
        activation.cell(change)
        return {}

    @staticmethod
    def _statistics() -> dict[str, int]:
        client = activation.current().client
        assert client is not None
        return client.statistics()

    def pid(self) -> dict[str, Any]:
        """Return the pid of this process."""
        return {"pid": os.getpid()}

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def orders(runner: Runner) -> dict[str, Callable[..., dict[str, Any]]]:
    """Return what a runner executes, by the name of the order."""
    found: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(runner, name)
        for name in (
            "train", "forget", "rewrite", "hold", "check", "reach", "sum", "threads", "touch",
            "issue", "scalars", "trips", "pid", "cell", "count",
        )
    }  # fmt: skip
    return found | {"steps": runner.each, "operators": runner.list_operators}


def serve(device: str, executes: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Execute the orders that arrive as lines, until their end.

    Exits if the requested device does not exist: a silent fallback would compare the CPU with
    itself.
    """
    if torch.zeros(1, device=device).device.type != device:
        sys.exit(f"no {device} device")
    for line in sys.stdin:
        order = json.loads(line)
        answer = executes[order.pop("do")](**order)
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--log-every", type=int, default=10)
    options = parser.parse_args()
    runner = Runner(options.device, options.small, options.log_every)
    serve(options.device, orders(runner))


if __name__ == "__main__":
    main()
