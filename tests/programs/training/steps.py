"""Train a small net on one device; each line of input asks for some steps and their losses.

``steps.py DEVICE SEED``, then lines with a number of steps, or the name of a file until which to
train; answered by one line of losses in hexadecimal, as they are compared bit for bit. Ends with
its input.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch


def steps(wanted: str) -> Iterable[object]:
    """Return the indices of this many steps, or of steps until a file exists."""
    if wanted.isdigit():
        return range(int(wanted))
    return itertools.takewhile(lambda _: not Path(wanted).exists(), itertools.count())


def main() -> None:
    device, seed = sys.argv[1], int(sys.argv[2])
    assert torch.zeros(1, device=device).device.type == device
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 10),
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    images = torch.randn(256, 1, 8, 8)
    labels = torch.randint(0, 10, (256,))
    print("ready", flush=True)
    at = 0
    for line in sys.stdin:
        losses = []
        for _ in steps(line.strip()):
            part = slice(at % 256, at % 256 + 32)
            at += 32
            loss = torch.nn.functional.cross_entropy(
                net(images[part].to(device)), labels[part].to(device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(*[float(each).hex() for each in losses], flush=True)


if __name__ == "__main__":
    main()
