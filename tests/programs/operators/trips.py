"""Count the round trips of what is read, printed and generated; run under a device session.

Prints one JSON object: how many requests the worker was asked for each.
"""

from __future__ import annotations

import json

import torch

from benchmarks import small
from kernelproxy.kernel.activation import current


def main() -> None:
    # cuda must be available: there is nothing to count on a CPU.
    assert torch.zeros(1, device="cuda").is_cuda
    client = current().client
    assert client is not None
    print(json.dumps(small.count_trips("cuda", lambda: client.statistics()["requests"])))


if __name__ == "__main__":
    main()
