"""Wait in a collective for a rank that never calls it, but reads its input until its end.

Each rank says "ready", those that wait from inside the wait.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import distributed

from kernelproxy.kernel.collectives.transport.endpoint import Endpoint


def main() -> None:
    distributed.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    distributed.all_reduce(x)
    if distributed.get_rank() == 0:
        print("ready", flush=True)
        sys.stdin.read()
        return
    original = Endpoint.waiting

    @contextlib.contextmanager
    def waiting(self: Endpoint) -> Iterator[None]:
        Endpoint.waiting = original  # type: ignore[method-assign]
        with original(self):
            print("ready", flush=True)
            yield

    Endpoint.waiting = waiting  # type: ignore[method-assign]
    try:
        distributed.all_reduce(x)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(0)
    except distributed.DistBackendError as error:
        print(error, flush=True)
        sys.exit(0)


if __name__ == "__main__":
    main()
