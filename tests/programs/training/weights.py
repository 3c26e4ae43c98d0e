"""Hold weights on one device, and execute a command on them for each line of input.

``weights.py DEVICE SEED``, then lines, each answered by one:

    load COUNT BYTES    upload this many random matrices; "there"
    fill COUNT BYTES    the same from one piece of host memory; "there"
    infer TIMES         multiply a vector by all of them, this many times; a number
    sum                 add all of them, on the device; a number
    digest              read all of them back; a digest
    alone               compute something without them; a number

Numbers are in hexadecimal, as they are compared bit for bit. Ends with its input.
"""

from __future__ import annotations

import hashlib
import sys

import torch


class Weights:
    """Matrices on a device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.held = device, list[torch.Tensor]()
        self.random = torch.Generator().manual_seed(seed)

    def load(self, count: str, size: str) -> str:
        side = int((int(size) // 4) ** 0.5)
        for _ in range(int(count)):
            self.held.append(torch.randn(side, side, generator=self.random).to(self.device))
        return self._there()

    def fill(self, count: str, size: str) -> str:
        block = torch.ones(int(size) // 4)
        self.held += [block.to(self.device) for _ in range(int(count))]
        return self._there()

    def infer(self, times: str) -> str:
        with torch.no_grad():
            for _ in range(int(times)):
                x = torch.ones(self.held[0].shape[1], device=self.device)
                for each in self.held:
                    x = torch.tanh(each @ x)
        return float(x.sum()).hex()

    def sum(self) -> str:
        return float(sum(each.sum(dtype=torch.float64).item() for each in self.held)).hex()

    def digest(self) -> str:
        found = hashlib.sha256()
        for each in self.held:
            found.update(each.cpu().numpy().data)
        return found.hexdigest()

    def alone(self) -> str:
        return float(torch.ones(3, device=self.device).sum()).hex()

    def _there(self) -> str:
        torch.cuda.synchronize()
        return "there"


def main() -> None:
    device, seed = sys.argv[1], int(sys.argv[2])
    assert torch.zeros(1, device=device).device.type == device
    weights = Weights(device, seed)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(weights, verb)(*arguments), flush=True)


if __name__ == "__main__":
    main()
