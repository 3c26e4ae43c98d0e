"""Ends while daemon threads wait for the device."""

import threading

import torch

begun = threading.Barrier(4)


def wait_again_and_again() -> None:
    torch.cuda.synchronize()
    begun.wait()
    while True:
        torch.cuda.synchronize()


for _ in range(3):
    threading.Thread(target=wait_again_and_again, daemon=True).start()
begun.wait()
print("done")
