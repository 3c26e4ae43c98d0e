"""Cost of checkpoints and hibernation for a notebook: a real kernel under a separate daemon."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from benchmarks.daemon import MIB, ORDER_SECONDS
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Checkpoint, CheckpointReply, StatusReply, StatusRequest

POLL_SECONDS = 0.05
HIBERNATE_AFTER = "1"


@dataclass(frozen=True)
class Put:
    """A checkpoint that was requested from outside, in the namespace form.

    Parameters
    ----------
    bytes : int
        Size of the device's state, all of which had just changed.
    seconds : float
        Until it was on disk.
    copying : float
        Part of these for copying the device's state.
    blocked : float
        The longest time that an empty cell waited meanwhile.
    """

    bytes: int
    seconds: float
    copying: float
    blocked: float


@dataclass(frozen=True)
class Again:
    """Bytes on disk of the first checkpoint, and of a second one of the unchanged notebook."""

    forms: str
    first: int
    second: int


@dataclass(frozen=True)
class Rest:
    """A kernel that hibernated with `bytes` in host memory, and then ran a cell.

    Parameters
    ----------
    bytes : int
    held : int
        Memory of its process in bytes.
    answers : list of float
        Seconds from sending a cell to the end of its output, for each run.
    """

    bytes: int
    held: int
    answers: list[float]


@dataclass(frozen=True)
class BenchmarkNotebooks:
    """All results of this benchmark."""

    puts: list[Put]
    agains: list[Again]
    rest: Rest | None


class BenchmarkKernel:
    """A kernel under the provisioner ``sing``."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self._client = manager, client
        self.said = ""  # output of the last cell

    def run(self, code: str) -> float:
        """Run a cell; return the seconds until its output had ended.

        Raises
        ------
        RuntimeError
            If it fails.
        """
        self.said, begin = "", time.perf_counter()
        reply = self._client.execute_interactive(
            code, timeout=ORDER_SECONDS, output_hook=self._receive, allow_stdin=False
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"a cell failed: {reply['content']}")
        return time.perf_counter() - begin

    def _receive(self, message: dict[str, Any]) -> None:
        self.said += message["content"].get("text", "")


@contextmanager
def _kernel() -> Iterator[BenchmarkKernel]:
    manager = KernelManager(kernel_name="python3")
    assert manager.kernel_spec is not None
    manager.kernel_spec.metadata["kernel_provisioner"] = {"provisioner_name": "sing"}
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=ORDER_SECONDS)
        yield BenchmarkKernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _session() -> dict[str, Any]:
    with agent_client.connect(start=False) as connection:
        (found,) = connection.expect(StatusReply, StatusRequest()).sessions
    return dict(found)


def _checkpoint(name: str, form: str) -> dict[str, Any]:
    """Make a checkpoint and return its entry in the list of checkpoints."""
    with agent_client.connect(start=False) as connection:
        request = Checkpoint(_session()["id"], name, form=form)
        return dict(connection.expect(CheckpointReply, request, ORDER_SECONDS).checkpoint)


def measure_put(kernel: BenchmarkKernel, count: int, name: str) -> Put:
    """Change all of the device's state, make a checkpoint, and run empty cells meanwhile."""
    kernel.run("for each in held: each.add_(1)\ntorch.cuda.synchronize()")
    done = threading.Event()
    seconds: list[float] = []

    def ask() -> None:
        begin = time.perf_counter()
        _checkpoint(name, "namespace")
        seconds.append(time.perf_counter() - begin)
        done.set()

    usual = statistics.median(kernel.run("pass") for _ in range(20))
    asking = threading.Thread(target=ask)
    asking.start()
    waits = []
    while not done.is_set():
        waits.append(kernel.run("pass"))
    asking.join()
    copying = float(_session()["snapshot"]["seconds"])
    return Put(count, seconds[0], copying, max(waits) - usual)


def measure_notebooks(count: int, times: int) -> BenchmarkNotebooks:
    """Measure with `count` bytes on the device, and then in host memory.

    Raises
    ------
    RuntimeError
        If a kernel's variables have changed.
    """
    with _kernel() as kernel:
        kernel.run(
            f"import torch\nheld = [torch.rand({count // 32}, device='cuda') for _ in range(8)]"
        )
        puts = [measure_put(kernel, count, f"put-{index}") for index in range(times)]
        agains = []
        for form in ("namespace", ""):
            first = _checkpoint(f"first-{form or 'best'}", form)
            second = _checkpoint(f"second-{form or 'best'}", form)
            agains.append(Again("+".join(first["forms"]), first["stored"], second["exclusive"]))
    os.environ["JUPYTER_SING_HIBERNATE_TIMEOUT"] = HIBERNATE_AFTER
    try:
        with _kernel() as kernel:
            rest = _measure_rest(kernel, count, times)
    finally:
        del os.environ["JUPYTER_SING_HIBERNATE_TIMEOUT"]
    return BenchmarkNotebooks(puts, agains, rest)


def _measure_rest(kernel: BenchmarkKernel, count: int, times: int) -> Rest | None:
    kernel.run(
        f"import os\nheld = b''.join(os.urandom(1 << 20) for _ in range({count // MIB}))\n"
        "said = hash(held)\n"
        "print(int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))"
    )
    held, answers = int(kernel.said), []
    for _ in range(times):
        begin = time.monotonic()
        while _session()["kernel_pid"] is not None:
            if time.monotonic() - begin > ORDER_SECONDS:
                return None
            time.sleep(POLL_SECONDS)
        answers.append(kernel.run("print(len(held))"))
        kernel.run("assert hash(bytes(memoryview(held))) == said")
    return Rest(count, held, answers)


def report(found: BenchmarkNotebooks) -> list[str]:
    """Return the results as Markdown tables."""
    lines = [
        "Checkpoints of a notebook, asked for while it runs cells, in the namespace form; all of",
        "the device's state has changed just before. Blocked: what the slowest empty cell took",
        "longer than such cells usually do.",
        "",
        "| state, MiB | on disk after, s | copying, ms | blocked, ms | of copying |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.bytes / MIB:.0f} | {p.seconds:.2f} | {p.copying * 1e3:.0f} | {p.blocked * 1e3:.0f} "
        f"| {p.blocked / p.copying:.1%} |"
        for p in found.puts
    ]
    lines += [
        "",
        "A second checkpoint of the unchanged notebook.",
        "",
        "| forms | first, MiB | second, MiB | of the first |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {a.forms} | {a.first / MIB:.0f} | {a.second / MIB:.2f} | {a.second / a.first:.2%} |"
        for a in found.agains
    ]
    if found.rest is None:
        return [*lines, "", "Kernels did not hibernate here."]
    answers = ", ".join(f"{each:.2f}" for each in found.rest.answers)
    lines += [
        "",
        f"A kernel that hibernated with {found.rest.bytes / MIB:.0f} MiB of random bytes gave back "
        f"{found.rest.held / MIB:.0f} MiB, and answered its next cell after {answers} s.",
    ]
    return lines
