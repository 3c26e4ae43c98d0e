"""One side of a paired measurement on a GPU: plain torch, or the proxied device.

Takes the orders of `runner`, and these:

    {"do": "measure", "program": "mlp", "steps": 10}  -> {"seconds": 0.1, "issued": 0.05,
                                                          "operators": 1900, ...}
    {"do": "copies", "bytes": 1073741824}             -> {"pinned to device": 52.1, ...}
    {"do": "driver"}                                  -> {"open": ["/dev/nvidiactl"]}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import Runner

REPEATS = 5


def counters() -> dict[str, int]:
    """Return counts of what this process has sent to its device; empty with plain torch."""
    activation = sys.modules.get("kernelproxy.kernel.activation")
    client = activation.current().client if activation else None
    return dict(client.statistics()) if client else {}


class GpuSide(Runner):
    """A runner for which plain torch has a GPU, too."""

    def measure(self, program: str, steps: int) -> dict[str, Any]:
        """Run some steps; return the seconds to issue and to complete them, and counts."""
        self.train(program, 1)
        before = counters()
        begin = time.perf_counter()
        for _ in range(steps):
            self.steps[program]()
        issued = time.perf_counter() - begin
        self._synchronize()
        seconds = time.perf_counter() - begin
        sent = {name: count - before[name] for name, count in counters().items()}
        return {"seconds": seconds, "issued": issued, **sent}

    def copies(self, bytes: int) -> dict[str, Any]:
        """Return the rates of copies between host and device, the best of several, in GB/s."""
        device = torch.ones(bytes, dtype=torch.uint8, device=self.device)
        pinned = torch.ones(bytes, dtype=torch.uint8, pin_memory=self.device != "cpu")
        pageable = torch.ones(bytes, dtype=torch.uint8)
        ways: dict[str, Callable[[], Any]] = {
            "pinned to device": lambda: device.copy_(pinned, non_blocking=True),
            "device to pinned": lambda: pinned.copy_(device, non_blocking=True),
            "pageable to device": lambda: device.copy_(pageable),
            "device to pageable": lambda: pageable.copy_(device),
        }
        return {name: bytes / self._best(copy) / 1e9 for name, copy in ways.items()}

    def driver(self) -> dict[str, Any]:
        """Return the GPU's device files that this process has open."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
        maps = Path("/proc/self/maps").read_text()
        found = {link for link in links if link.startswith("/dev/nvidia")}
        found |= {line.split()[-1] for line in maps.splitlines() if "/dev/nvidia" in line}
        return {"open": sorted(found)}

    def _best(self, function: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(REPEATS):
            self._synchronize()
            begin = time.perf_counter()
            function()
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    side = GpuSide(options.device, options.small, log_every=10)
    # The requested device must exist: a silent fallback would compare the CPU with itself.
    if torch.zeros(1, device=options.device).device.type != options.device:
        sys.exit(f"no {options.device} device")
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(side, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
