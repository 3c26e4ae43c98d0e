"""Jobs whose number of devices changes: how long they stand still."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.daemon import verb
from benchmarks.sharing.jobs import Daemon
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import MigrateRequest, StatusReply, StatusRequest

PROGRAM = Path(__file__).with_name("resized.py")
RANKS = 4
#: Numbers of devices, one after the other; the first move is not measured.
DEVICES = (1, 2, 4, 1)
#: Steps before and after each change.
STEPS = 8


@dataclass(frozen=True)
class Standstill:
    """A change of a job's number of devices.

    Parameters
    ----------
    mib : int
        MiB of parameters and optimizer on each rank.
    before, after : int
        Devices.
    usual, seconds : float
        Seconds of a step before, and for how much longer one took.
    """

    mib: int
    before: int
    after: int
    usual: float
    seconds: float


class ResizedJob:
    """A running job, and the times at which its steps ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._times: list[float] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("step "):
                with self._more:
                    self._times.append(float(line.split()[1]))
                    self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def steps(self, count: int) -> list[float]:
        """Wait for so many steps; return their seconds.

        Raises
        ------
        RuntimeError
            The job has ended.
        """
        with self._more:
            first = len(self._times)
            while len(self._times) < first + count + 1:
                if not self._more.wait(60.0) or self._process.poll() is not None:
                    raise RuntimeError("the job does not continue")
            return [b - a for a, b in itertools.pairwise(self._times[first:])]

    def spread(self, devices: int) -> float:
        """Move its ranks to so many devices; return by how much a step was longer than usual."""
        usual = statistics.median(self.steps(STEPS))
        with self._more:
            first = len(self._times) - 1
        ranks = sorted(_ranks())
        moves = [
            MigrateRequest(session, f"cpu:{index * devices // RANKS}")
            for index, (_, session) in enumerate(ranks)
        ]
        with ThreadPoolExecutor() as threads:
            list(threads.map(verb, moves))
        self.steps(STEPS)
        with self._more:
            longest = max(b - a for a, b in itertools.pairwise(self._times[first:]))
        return longest - usual


def _ranks() -> list[tuple[str, str]]:
    """Return names and ids of the sessions of the job's ranks."""
    with agent_client.connect(start=False) as connection:
        sessions = connection.expect(StatusReply, StatusRequest()).sessions
    return [(each["name"], each["id"]) for each in sessions if each["ranks"] == RANKS]


def measure_standstills(daemon: Daemon, sizes: Sequence[int]) -> Iterator[Standstill]:
    """Measure the changes of `DEVICES`, for jobs with so many MiB on each rank."""
    run = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", str(RANKS)]
    for mib in sizes:
        with daemon(max(DEVICES)), tempfile.TemporaryDirectory() as directory:
            enough = Path(directory) / "enough"
            with subprocess.Popen(
                [*run, str(PROGRAM), str(mib), str(enough)],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
            ) as process:  # fmt: skip
                job = ResizedJob(process)
                try:
                    job.spread(DEVICES[0])
                    for before, after in itertools.pairwise(DEVICES):
                        usual = statistics.median(job.steps(STEPS))
                        yield Standstill(mib, before, after, usual, job.spread(after))
                    enough.touch()
                    process.wait(60.0)
                finally:
                    process.terminate()


def report(found: Sequence[Standstill]) -> list[str]:
    """Return the figures as a table."""
    return [
        "A job of four ranks moves to another number of devices while it trains. All parameters",
        "and all of the optimizer's state change in each step, so everything is copied. The job",
        "stands still for as long as its longest step is longer than usual.",
        "",
        "| MiB of parameters and optimizer | devices | a step, ms | stands still, s |",
        "|---|---|---|---|",
        *(
            f"| {each.mib} on each rank, {each.mib * RANKS} in all | {each.before} to {each.after} "
            f"| {each.usual * 1e3:.0f} | **{each.seconds:.2f}** |"
            for each in found
        ),
    ]
