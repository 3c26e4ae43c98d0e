"""Keeps a device, and uses it little: from the first line of its input to the second one."""

from __future__ import annotations

import select
import sys

import torch

#: A program that computes elsewhere for longer gives its device to those that wait.
PAUSE_SECONDS = 0.02


def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    value = torch.zeros(1, device="cuda")
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        value += 1
        value.item()


if __name__ == "__main__":
    main()
