"""Pinned memory and other processes."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shlex
import subprocess
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from tests.surface.checking import check, refused


@check
def pinned_memory_and_loaders_with_workers() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
    assert sum(x.cuda(non_blocking=True).sum().item() for (x,) in loader) == 190.0


@check
def a_forked_child_raises_what_cuda_raises() -> None:
    x = torch.ones(1, device="cuda")
    for use in (lambda: x + 1, lambda: torch.ones(1, device="cuda"), torch.cuda.synchronize):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                use()
                os.write(send, b"nothing was raised")
            except RuntimeError as error:
                os.write(send, str(error).encode())
            os._exit(0)
        os.close(send)
        os.waitpid(child, 0)
        text = os.read(receive, 1000).decode()
        os.close(receive)
        assert text.startswith("Cannot re-initialize CUDA in forked subprocess"), text
    assert (x + 1).item() == 2


def in_another_process(queue: Any, given: torch.Tensor) -> None:
    queue.put((torch.cuda.is_available(), given.sum().item()))


@check
def a_spawned_child_has_no_device_but_gets_tensors_of_the_host() -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=in_another_process, args=(queue, torch.ones(3)))
    child.start()
    found = queue.get()
    child.join()
    assert found == (False, 3.0)


#: Prints whether a process may open GPUs, and which of their files it could open.
GPUS = """
import glob, os

def opens(path):
    try:
        return os.close(os.open(path, os.O_RDWR)) is None
    except OSError:
        return False

guarded = "/libsing_fstrack.so" in open("/proc/self/maps").read() and "SING_GPU_FILES" in os.environ
print(guarded, [path for path in glob.glob("/dev/nvidia*") if opens(path)])
"""


@check
def no_process_of_a_program_opens_a_gpu() -> None:
    child = [sys.executable, "-c", GPUS + "print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    assert subprocess.check_output(child, text=True) == "True []\n-1\n"
    shell = " ".join(map(shlex.quote, child))
    assert subprocess.getoutput(shell) == "True []\n-1"
    # A program may give its children the variables that it sees.
    seen = [sys.executable, "-c", GPUS]
    assert subprocess.check_output(seen, env=dict(os.environ), text=True) == "True []\n"
    assert "True []" in subprocess.getoutput(f"env CUDA_VISIBLE_DEVICES=0 {shell}")
    own: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(GPUS, own)
    assert out.getvalue() == "True []\n"


@check
def device_tensors_are_not_shared_with_other_processes() -> None:
    x = torch.ones(3, device="cuda")
    for forbidden in (
        lambda: ForkingPickler.dumps(x),
        lambda: ForkingPickler.dumps(torch.nn.Linear(2, 2).cuda()),
        lambda: x.untyped_storage()._share_cuda_(),
    ):
        assert "behind a device proxy" in refused(forbidden)
    # As on a GPU, where all tensors are sharable.
    assert x.share_memory_() is x
    assert torch.ones(3).share_memory_().is_shared()


@check
def readers_of_a_queue_are_told_what_it_refused() -> None:
    queue: Any
    for queue in (torch.multiprocessing.Queue(maxsize=3), multiprocessing.JoinableQueue()):
        queue.put({"some": [torch.ones(3, device="cuda")]})
        queue.put(torch.nn.Linear(2, 2).cuda())
        queue.put(torch.ones(3))
        for _ in range(2):
            assert "behind a device proxy" in refused(partial(queue.get, timeout=60))
        assert queue.get(timeout=60).sum() == 3


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index) ** 2)


@check
def loaders_work_however_their_workers_start() -> None:
    for method in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(
            Squares(), 2, num_workers=2, pin_memory=True, multiprocessing_context=method
        )
        found = list(loader)
        assert all(x.is_pinned() for x in found)
        assert sum(x.to("cuda", non_blocking=True).sum().item() for x in found) == 140
