"""One side of a paired measurement on a GPU: plain torch, or the proxied device.

Takes the orders of `runner`, and these:

    {"do": "measure", "program": "mlp", "steps": 10}  -> {"seconds": 0.1, "issued": 0.05,
                                                          "operators": 1900, ...}
    {"do": "copies", "bytes": 1073741824}             -> {"pinned to device": 52.1, ...}
    {"do": "driver"}                                  -> {"open": ["/dev/nvidiactl"]}
    {"do": "family", "name": "fft", "file": "/tmp/1"} -> {"results": 3}
    {"do": "fault", "kind": "unread"}                 -> {"raised": "..."}
    {"do": "kept"}                                    -> {"intact": true, "raised": ""}
    {"do": "kernels"}                                 -> {"seconds": 0.5}
    {"do": "upload", "bytes": 1073741824}             -> {"seconds": 0.5}
    {"do": "peak", "high": 1000, "low": 100, "times": 3} -> {"raised": ""}
    {"do": "losses", "program": "gpt2", "steps": 10}  -> {"losses": ["0x1.8p+1", ...]}
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu import families
from benchmarks.runner import Runner, orders, serve

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

    def losses(self, program: str, steps: int, autocast: bool = False) -> dict[str, Any]:
        """Run some steps; return each loss in hexadecimal."""
        kind = torch.bfloat16 if autocast else None
        self.train(program, 0)  # made outside the context
        with torch.autocast(self.device, kind, enabled=autocast):
            found = [float(self.steps[program]()).hex() for _ in range(steps)]
        return {"losses": found}

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

    def family(self, name: str, file: str) -> dict[str, Any]:
        """Compute a family of operators, and store the results in a file."""
        found = families.compute(name, self.device)
        torch.save(found, file)
        return {"results": len(found)}

    def fault(self, kind: str) -> dict[str, Any]:
        """Start a kernel with an index that is out of range; return what was raised.

        Parameters
        ----------
        kind : {"read", "unread", "compiled"}
            Whether the result is read; or the kernel is one that `torch.compile` generated.
        """
        table = torch.randn(10, 4, device=self.device)
        wrong = torch.tensor([3, 99999], device=self.device)
        pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.embedding
        if kind == "compiled":
            pick = torch.compile(lambda at, rows: F.embedding(at, rows) * 2 + 1)
            pick(torch.tensor([1, 2], device=self.device), table).sum().item()
        try:
            picked = pick(wrong, table)
            if kind != "unread":
                picked.sum().item()
        except (RuntimeError, IndexError) as error:
            return {"raised": str(error) or type(error).__name__}
        return {"raised": ""}

    def kept(self) -> dict[str, Any]:
        """Return whether the held data is what it was, and whether the device computes.

        Also returns what the first synchronisation raised: the error of an operator whose result
        was not read.
        """
        if not self.held:
            self.held = [torch.arange(64.0, device=self.device).reshape(8, 8)]
        raised = ""
        try:
            self._synchronize()
        except (RuntimeError, IndexError) as error:
            raised = str(error)
        (held,) = self.held
        expected = torch.arange(64.0).reshape(8, 8)
        whole = float((held @ held).sum()) == float((expected @ expected).sum())
        return {"intact": torch.equal(held.cpu(), expected) and whole, "raised": raised}

    def kernels(self) -> dict[str, Any]:
        """Return the seconds of a first matrix product and convolution: libraries initialise."""
        begin = time.perf_counter()
        x = torch.ones(64, 64, device=self.device)
        product = (x @ x).sum()
        image = torch.ones(1, 3, 16, 16, device=self.device)
        total = product + nn.Conv2d(3, 4, 3).to(self.device)(image).sum().detach()
        total.item()
        return {"seconds": time.perf_counter() - begin}

    def upload(self, bytes: int) -> dict[str, Any]:
        """Return the seconds for moving a model of so many bytes to the device."""
        width = 4096 if bytes >= 1 << 28 else 256
        count = max(1, bytes // (width * width * 4))
        with torch.device("meta"):  # initial values would take longer than the copy
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        model.to_empty(device="cpu")
        for weight in model.parameters():
            weight.detach().fill_(1.0)
        begin = time.perf_counter()
        model.to(self.device)
        self._synchronize()
        return {"seconds": time.perf_counter() - begin, "bytes": count * width * width * 4}

    def peak(self, high: int, low: int, times: int) -> dict[str, Any]:
        """Use `high` bytes once, then `low` bytes `times` times; return what was raised."""
        try:
            for size in (high, *[low] * times):
                block = torch.ones(size, dtype=torch.uint8, device=self.device)
                if int(block[-1]) != 1:
                    return {"raised": "a wrong number"}
                del block
        except RuntimeError as error:
            return {"raised": f"{type(error).__name__}: {error}"[:300]}
        return {"raised": ""}

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
    own = (
        "measure", "losses", "copies", "driver", "family", "fault", "kept", "kernels", "upload",
        "peak",
    )  # fmt: skip
    executes = orders(side) | {name: getattr(side, name) for name in own}
    serve(options.device, executes)


if __name__ == "__main__":
    main()
