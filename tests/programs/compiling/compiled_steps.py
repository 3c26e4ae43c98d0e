"""Train a compiled net; each line of input asks for so many steps and their losses.

``compiled_steps.py DEVICE SEED``, as `steps.py`. It has dropout and running statistics, and batches
of changing sizes: graphs use the device's generator, change their inputs, and have symbols.
"""

from __future__ import annotations

import sys

import torch


def main() -> None:
    device, seed = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2),
        torch.nn.Tanh(), torch.nn.Linear(16, 4),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    data = torch.randn(512, 8)
    compiled = torch.compile(net, dynamic=True)
    torch.manual_seed(seed + 1)
    print("ready", flush=True)
    at = 0
    for line in sys.stdin:
        losses = []
        for _ in range(int(line)):
            size = 8 + at % 3 * 5
            at += 1
            optimizer.zero_grad()
            loss = compiled(data[at * 7 : at * 7 + size].to(device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(*[loss.item().hex() for loss in losses], flush=True)


if __name__ == "__main__":
    main()
