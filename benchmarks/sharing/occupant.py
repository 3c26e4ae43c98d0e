"""Keeps its device and uses it little, from one line of its input to the next one.

Prints a line when it has the device, and when it does not use it any more.
"""

from __future__ import annotations

import select
import sys

import torch

#: A program that computes elsewhere for longer gives its device to those that wait.
PAUSE_SECONDS = 0.02


def main() -> None:
    print("ready", flush=True)
    while sys.stdin.readline():
        value = torch.zeros(1, device="cuda")
        value.item()
        print("begun", flush=True)
        while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            value += 1
            value.item()
        sys.stdin.readline()
        print("over", flush=True)


if __name__ == "__main__":
    main()
