"""Pinned memory and other processes."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
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


def in_a_fork(use: Callable[[], object]) -> str:
    """Return what a function returns or raises in a forked child, as text."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, str(use()).encode())
        except RuntimeError as error:
            os.write(send, str(error).encode())
        os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    text = os.read(receive, 1000).decode()
    os.close(receive)
    return text


def trained() -> list[float]:
    """Return the weights after a step of training, by the device."""
    torch.manual_seed(5)
    net = torch.nn.Linear(3, 2).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(4, 3, device="cuda")).square().sum().backward()
    optimizer.step()
    return [*net.weight.flatten().tolist(), *net.bias.tolist()]


@check
def a_forked_child_has_a_session_of_its_own() -> None:
    expected = trained()
    sessions = {os.environ["SING_SESSION"]}
    for _ in range(2):
        weights, session = in_a_fork(lambda: (trained(), os.environ["SING_SESSION"])).rsplit(",", 1)
        assert weights == f"({expected}", weights
        sessions.add(session.strip(" ')"))
    assert len(sessions) == 3
    assert trained() == expected


@check
def a_forked_child_cannot_use_what_its_parent_made() -> None:
    x = torch.ones(1, device="cuda")
    event, generator = torch.cuda.Event(enable_timing=True), torch.Generator("cuda")
    event.record()
    for use in (
        lambda: x + 1,
        x.item,
        lambda: torch.rand(1, device="cuda", generator=generator),
        event.record,
    ):
        assert "the process from which this one was forked" in in_a_fork(use)
    assert in_a_fork(event.query) == "True"
    assert in_a_fork(torch.cuda.synchronize) == "None"
    assert (x + 1).item() == 2


@check
def a_forked_child_computes_on_the_host_although_its_parent_used_threads() -> None:
    torch.set_num_threads(2)
    large = torch.ones(1 << 20)
    assert (large * 2).sum() == 2 << 20
    assert (
        in_a_fork(lambda: ((large * 2).sum().item(), torch.get_num_threads())) == "(2097152.0, 1)"
    )


@check
def a_forked_child_that_only_seeds_opens_no_session() -> None:
    torch.ones(1, device="cuda")
    before = os.environ["SING_SESSION"]
    assert in_a_fork(lambda: (torch.manual_seed(1), os.environ["SING_SESSION"])[1]) == before


def fill(index: int) -> str:
    """Use several devices, which are labels of the same one."""
    torch.cuda.set_device(index)
    x = torch.randn(2, 3, requires_grad=True, device="cuda")
    y = x.to("cuda:1") @ torch.ones(3, 2, device="cuda:1")
    y.sum().backward()
    assert x.grad is not None
    devices = [x.device, x.grad.device, y.device, (y * 2).device, torch.empty_like(y).device]
    return (
        f"{[each.index for each in devices]} {torch.equal(x.grad.cpu(), torch.full((2, 3), 2.0))}"
    )


@check
def a_child_uses_any_device_as_a_label() -> None:
    assert in_a_fork(lambda: fill(3)) == "[3, 3, 1, 1, 1] True"
    assert in_a_fork(lambda: fill(0)) == "[0, 0, 1, 1, 1] True"
    assert torch.cuda.device_count() == 1


def in_another_process(queue: Any, given: torch.Tensor) -> None:
    queue.put((torch.cuda.is_available(), given.sum().item()))


@check
def a_spawned_child_sees_the_device_and_gets_tensors_of_the_host() -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=in_another_process, args=(queue, torch.ones(3)))
    child.start()
    found = queue.get()
    child.join()
    assert found == (True, 3.0)


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
    # The notice to a program that would use the GPU goes to its standard error.
    shell = " ".join(map(shlex.quote, child))
    assert subprocess.check_output(shell, shell=True, text=True) == "True []\n-1\n"
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
