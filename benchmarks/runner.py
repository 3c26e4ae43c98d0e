"""One side of a paired measurement: trains what it is told to, and says how long it took.

Reads orders as lines of JSON and answers each with one, so that two of these, one on the CPU and
one on the proxied device, can take turns within seconds of each other:

    {"do": "train", "program": "mlp", "steps": 10}   -> {"seconds": 0.1}
    {"do": "steps", "program": "mlp", "steps": 10}   -> {"steps": [[1.0, 1.1], ...]}
    {"do": "touch"}                                  -> {"seconds": 0.1}
    {"do": "forget"}                                 -> {}        drop the programs' tensors
    {"do": "hold", "bytes": 1073741824}              -> {"sum": 0.5}
    {"do": "check"}                                  -> {"sum": 0.5}
    {"do": "threads"}                                -> {"threads": 2}
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import programs

PROGRAMS = {
    **programs.TRAINING, **programs.TRANSFORMERS, "gpt2 generation": programs.gpt2_generate,
    "large": programs.large, "frozen": programs.frozen,
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
        The loss is fetched after every so many steps, as training loops do.
    """

    def __init__(self, device: str, small: bool, log_every: int) -> None:
        self.device, self.small, self.log_every = device, small, log_every
        self.steps: dict[str, programs.Step] = {}
        self.held: list[torch.Tensor] = []
        self.touched: torch.Tensor | None = None

    def train(self, program: str, steps: int) -> dict[str, Any]:
        """Run some steps; the clock stops when the device is done."""
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

    def each(self, program: str, steps: int) -> dict[str, Any]:
        """Run some steps, each to its end: when each began and ended, by the monotonic clock."""
        if program not in self.steps:
            self.steps[program] = PROGRAMS[program](self.device, self.small)
        step, moments = self.steps[program], []
        for _ in range(steps):
            begin = time.monotonic()
            step().item()
            moments.append([begin, time.monotonic()])
        return {"steps": moments}

    def touch(self) -> dict[str, Any]:
        """Use a few bytes of what is held, and wait for them."""
        if self.touched is None:
            self.touched = torch.ones(16, device=self.device)
        begin = time.perf_counter()
        (self.touched + 1).sum().item()
        return {"seconds": time.perf_counter() - begin}

    def forget(self) -> dict[str, Any]:
        """Drop all programs."""
        self.steps.clear()
        gc.collect()
        return {}

    def hold(self, bytes: int) -> dict[str, Any]:
        """Fill device memory with random numbers, which do not compress."""
        torch.manual_seed(3)
        count = bytes // 4 // BLOCKS
        self.held = [torch.rand(count, device=self.device) for _ in range(BLOCKS)]
        return self.check()

    def check(self) -> dict[str, Any]:
        """Sum up what is held."""
        return {"sum": sum(block.double().mean().item() for block in self.held)}

    def threads(self) -> dict[str, Any]:
        """Compute threads of this process."""
        return {"threads": torch.get_num_threads()}

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--log-every", type=int, default=10)
    options = parser.parse_args()
    runner = Runner(options.device, options.small, options.log_every)
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(runner, name)
        for name in ("train", "forget", "hold", "check", "threads", "touch")
    }
    orders["steps"] = runner.each
    # What was asked for must be there: a silent fallback would compare the CPU with itself.
    if torch.zeros(1, device=options.device).device.type != options.device:
        sys.exit(f"no {options.device} device")
    for line in sys.stdin:
        order = json.loads(line)
        answer = orders[order.pop("do")](**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
