"""Jobs of several ranks, on as many devices and on fewer, compared with plain torch on the CPU.

The job trains an MLP of 1.3 million parameters with DistributedDataParallel and AdamW; each rank
and each device has one compute thread. The ranks of plain torch communicate through gloo.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kernelproxy.common.paths import runtime_dir

PROGRAM = Path(__file__).with_name("rank.py")
SING = [sys.executable, "-m", "jupyter_sing.cli"]
#: Ranks, and devices on which they run.
Places = tuple[tuple[int, int], ...]
PLACES: Places = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1))

#: What a process of several sessions logs: microseconds of a switch, calls that were not executed,
#: or only later, and the most memory that their tensors took.
SHARED = re.compile(
    r"^worker: .* switches of (\d+) us, .* executed, (\d+) not \(and (\d+) .* (\d+) MiB held",
    re.MULTILINE,
)

#: Of the job whose memory is measured.
MEMORY_STEPS = 5

#: Starts a daemon, given its number of devices.
Daemon = Callable[[int], AbstractContextManager[object]]


@dataclass(frozen=True)
class JobSteps:
    """Steps of a job on one number of devices.

    Parameters
    ----------
    ranks, devices : int
    proxied, plain : float
        Seconds of one step, with sessions and with plain torch on the CPU.
    alone : float
        Seconds of one step of a job of one rank.
    switch : float
        Microseconds from one rank to the next one in their common process; 0 without one.
    optimizer : int
        Operators of the optimizer in a step.
    spared : float
        Operators in a step that were not executed, as another rank's results were used, for each
        rank but one.
    """

    ranks: int
    devices: int
    proxied: float
    plain: float
    alone: float
    switch: float = 0.0
    optimizer: int = 0
    spared: float = 0.0

    @property
    def of_ideal(self) -> float:
        """The step, divided by what the ranks of the busiest device need one after the other."""
        return self.proxied / (self.alone * -(-self.ranks // self.devices))


@dataclass(frozen=True)
class JobMemory:
    """Memory of the tensors of a job on one device.

    Parameters
    ----------
    ranks : int
    held : float
        Most MiB at a time, what ranks hold together once.
    parameters, activations : float
        MiB of one rank's model, and of what one forward pass keeps.
    """

    ranks: int
    held: float
    parameters: float
    activations: float

    @property
    def expected(self) -> float:
        """MiB of parameters, AdamW's state, gradients twice, and one rank's activations."""
        return 5 * self.parameters + self.activations


def measure_jobs(daemon: Daemon, steps: int, places: Places) -> Iterator[JobSteps]:
    """Measure jobs; just before, a job of one rank, and plain torch for each number of ranks.

    Parameters
    ----------
    daemon
        See `Daemon`.
    steps : int
        Number of steps that are measured.
    places : tuple of (int, int)
        Number of ranks, and of devices, of each job.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    plain = dict[int, float]()
    for ranks, devices in places:
        if ranks not in plain:
            plain[ranks] = _run(torchrun, ranks, "cpu", steps)["step"]
        alone = _run_proxied(daemon, 1, 1, steps)[0]["step"] if ranks > 1 else 0.0
        found, log = _run_proxied(daemon, ranks, devices, steps)
        proxied = found["step"]
        alone = alone or proxied
        shared = SHARED.findall(log)
        if devices > 1 or not shared:
            yield JobSteps(ranks, devices, proxied, plain[ranks], alone)
            continue
        switch, saved, later, _ = map(int, shared[-1])
        spared = (saved - later) / found["steps"] / (ranks - 1)
        calls = int(found["calls"])
        yield JobSteps(ranks, devices, proxied, plain[ranks], alone, switch, calls, spared)


def measure_memory(daemon: Daemon, ranks: int, width: int) -> JobMemory:
    """Measure the memory of ranks on one device, whose gradients are views of buckets.

    Parameters
    ----------
    daemon
        See `Daemon`.
    ranks : int
    width : int
        Of the model's largest layer.
    """
    found, log = _run_proxied(daemon, ranks, 1, MEMORY_STEPS, str(width))
    *_, held = map(int, SHARED.findall(log)[-1])
    return JobMemory(ranks, held, found["parameters"] / 2**20, found["activations"] / 2**20)


def _run_proxied(
    daemon: Daemon, ranks: int, devices: int, steps: int, *more: str
) -> tuple[dict[str, float], str]:
    """Run a job with sessions; return what its first rank has measured, and the daemon's log."""
    with daemon(devices):
        found = _run([*SING, "run"], ranks, "cuda", steps, *more)
        subprocess.run([*SING, "stop"], check=True)  # all processes have written to the log
        return found, (runtime_dir() / "agent.log").read_text(encoding="utf-8", errors="replace")


def _run(
    launcher: Sequence[str], ranks: int, kind: str, steps: int, *more: str
) -> dict[str, float]:
    """Run a job; return what its first rank has measured."""
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), str(PROGRAM), kind, str(steps), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("{"))
    found: dict[str, float] = json.loads(line)
    return found


def report(found: Sequence[JobSteps]) -> list[str]:
    """Return the figures as a table."""
    return [
        "An MLP of 1.3 million parameters under DistributedDataParallel, one compute thread for",
        "each rank and each device. Ideal is the step of one rank, as often as the busiest device",
        "has ranks; the weights are the same bits on each number of devices. Ranks of one device",
        "share a process: time of a switch between them, and operators in a step that were not",
        "executed, for each rank but one, beside those that its optimizer has.",
        "",
        "| ranks | devices | plain torch and gloo, ms/step | proxied, ms/step | of plain "
        "| of the ideal | a switch, us | not executed, optimizer |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {each.ranks} | {each.devices} | {each.plain * 1e3:.1f} | {each.proxied * 1e3:.1f} "
            f"| **{each.proxied / each.plain:.2f}** | {each.of_ideal:.2f} "
            + (
                f"| {each.switch:.0f} | {each.spared:.1f}, {each.optimizer} |"
                if each.switch
                else "| | |"
            )
            for each in found
        ),
    ]


def report_memory(memory: JobMemory) -> list[str]:
    """Return the figures as text."""
    return [
        f"Tensors of {memory.ranks} ranks on one device, of which each has",
        f"{memory.parameters:.0f} MiB of parameters, take at most {memory.held:.0f} MiB at a time.",
        "Parameters, optimizer, twice the gradients, and the activations of one rank:",
        f"{memory.expected:.0f} MiB.",
    ]
