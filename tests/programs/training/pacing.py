"""Train as `steps.py` does, and do something else after each step, as ``PACE`` says.

``wait``: for some milliseconds, as for data. ``thrash FILE``: use a resource that is shared with
the other programs that name this file, one at a time, and that takes long to hand over.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import time
from pathlib import Path

import torch

WAIT_SECONDS = 0.008
USE_SECONDS, CHANGE_SECONDS = 0.003, 0.04


def wait() -> None:
    """Wait as a program does whose data loading takes longer than its step."""
    time.sleep(WAIT_SECONDS)


def thrash(file: int) -> None:
    """Use the resource that is shared with the others."""
    fcntl.flock(file, fcntl.LOCK_EX)
    me = str(os.getpid()).encode()
    if os.pread(file, 20, 0) != me:
        time.sleep(CHANGE_SECONDS)
        os.ftruncate(file, 0)
        os.pwrite(file, me, 0)
    time.sleep(USE_SECONDS)
    fcntl.flock(file, fcntl.LOCK_UN)


def main() -> None:
    how, *path = os.environ["PACE"].split()
    file = os.open(path[0], os.O_RDWR | os.O_CREAT) if path else -1
    plain = torch.optim.AdamW.step

    def step(*arguments: object) -> object:
        result = plain(*arguments)  # type: ignore[arg-type]
        torch.cuda.synchronize()  # so that it does nothing while its session waits for its turn
        wait() if how == "wait" else thrash(file)
        return result

    torch.optim.AdamW.step = step  # type: ignore[method-assign, assignment]
    sys.argv[0] = str(Path(__file__).with_name("steps.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
