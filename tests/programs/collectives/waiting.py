"""Wait in a collective for a rank that never calls it, but reads its input until its end."""

from __future__ import annotations

import sys

import torch
from torch import distributed


def main() -> None:
    distributed.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    distributed.all_reduce(x)
    print("ready", flush=True)
    if distributed.get_rank() == 0:
        sys.stdin.read()
        return
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
