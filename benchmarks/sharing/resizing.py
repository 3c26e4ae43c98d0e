"""Jobs whose number of devices changes: how long they stand still.

Other programs request devices of the job by name, and give them back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sharing.jobs import SING, Daemon
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import StatusReply, StatusRequest

PROGRAM, OCCUPANT = (Path(__file__).with_name(name) for name in ("resized.py", "occupant.py"))
RANKS = 4
#: Steps before and after each change.
STEPS = 8
#: A growth is announced some seconds before.
POLICY = "jobs: {grow_after: 6 s}\n"
SECONDS_MAX = 60.0


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
        Seconds of a step before, and for how much longer one took than before and after.
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

    def change(self, begin: Callable[[], object], devices: int, mib: int) -> Standstill:
        """Begin something after which the job has so many devices; measure how that shows.

        Raises
        ------
        TimeoutError
            It does not get them.
        """
        before, usual = len(devices_of_job()), statistics.median(self.steps(STEPS))
        with self._more:
            first = len(self._times) - 1
        begin()
        wait_for(devices)
        after = statistics.median(self.steps(STEPS))
        with self._more:
            longest = max(b - a for a, b in itertools.pairwise(self._times[first:]))
        return Standstill(mib, before, devices, usual, longest - max(usual, after))


class Occupants:
    """Programs that each can keep a device; they run inside `with`."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices
        self._programs: dict[int, subprocess.Popen[str]] = {}
        self._keeping: set[int] = set()
        self._changing: set[int] = set()

    def __enter__(self) -> Occupants:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            for device in self._devices:
                self._programs[device] = subprocess.Popen(
                    [*SING, "run", "--device", f"cpu:{device}", str(OCCUPANT)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
            self._changing = set(self._devices)
            self.settle()  # they have imported torch
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self.end(set(self._programs))

    def end(self, devices: Set[int]) -> None:
        """End the programs of these devices for good: a job grows only onto devices without any."""
        for device in devices:
            program = self._programs.pop(device)
            program.kill()
            program.communicate()
        self._keeping -= devices
        self._changing -= devices

    def keep(self, devices: Set[int]) -> None:
        """Begin to keep these devices, and no others; does not wait until that is so."""
        self.settle()
        self._changing = self._keeping ^ devices
        self._keeping = set(devices)
        for device in self._changing:
            stream = self._programs[device].stdin
            assert stream
            stream.write("\n")
            stream.flush()

    def settle(self) -> None:
        """Wait until they keep the devices, or do not use them any more."""
        for device in self._changing:
            stream = self._programs[device].stdout
            assert stream
            stream.readline()
        self._changing = set()


def devices_of_job() -> list[str]:
    """Return the devices on which ranks are."""
    with agent_client.connect(start=False) as connection:
        sessions = connection.expect(StatusReply, StatusRequest()).sessions
    return sorted({each["device"] or "" for each in sessions if each["ranks"] == RANKS})


def wait_for(devices: int) -> None:
    """Wait until the job has so many devices; raises TimeoutError."""
    deadline = time.monotonic() + SECONDS_MAX
    while len(devices_of_job()) != devices:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job is on {devices_of_job()}, not on {devices} devices")
        time.sleep(0.05)


@contextlib.contextmanager
def running(mib: int, directory: Path) -> Iterator[ResizedJob]:
    """Run the job, and end it."""
    enough = directory / "enough"
    with subprocess.Popen(
        [*SING, "run", "--nproc-per-node", str(RANKS), str(PROGRAM), str(mib), str(enough)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield ResizedJob(process)
            enough.touch()
            process.wait(SECONDS_MAX)
        finally:
            process.terminate()


#: The job's number of devices, and what others do before.
CHANGES: tuple[tuple[int, Callable[[Occupants], None]], ...] = (
    (2, lambda others: others.keep({3})),
    (1, lambda others: others.keep({1, 2, 3})),
    (2, lambda others: others.end({1})),
    (4, lambda others: others.end({2, 3})),
)


def measure_standstills(daemon: Daemon, sizes: Sequence[int]) -> Iterator[Standstill]:
    """Measure jobs with so many MiB on each rank, on 4, 2, 1, 2 and 4 devices."""
    for mib in sizes:
        with daemon(RANKS), tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (policy := directory / "policy.yaml").write_text(POLICY)
            subprocess.run([*SING, "policy", "apply", str(policy)], check=True)
            with Occupants((1, 2, 3)) as others, running(mib, directory) as job:
                wait_for(RANKS)
                for devices, begin in CHANGES:
                    yield job.change(functools.partial(begin, others), devices, mib)


def report(found: Sequence[Standstill]) -> list[str]:
    """Return the figures as a table."""
    return [
        "A job of four ranks gives devices to other programs while it trains, and gets them back.",
        "All parameters and all of the optimizer's state change in each step; what other ranks",
        "hold where a rank moves is not copied. The job stands still for as long as its longest",
        "step is longer than usual before and after.",
        "",
        "| MiB of parameters and optimizer | devices | a step, ms | stands still, s |",
        "|---|---|---|---|",
        *(
            f"| {each.mib} on each rank, {each.mib * RANKS} in all | {each.before} to {each.after} "
            f"| {each.usual * 1e3:.0f} | **{each.seconds:.2f}** |"
            for each in found
        ),
    ]
