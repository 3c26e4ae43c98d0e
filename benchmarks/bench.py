"""Cost of the proxy: paired measurements against plain torch, `make bench`.

For every program two processes live side by side, one on the CPU and one on a proxied software
device with as many compute threads. They take turns, round by round, so that both meet the same
conditions; the figure is the median of the rounds' ratios. Below 1, the proxied program is the
faster one: its Python and autograd overlap with the execution in the worker.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.daemon import NAME, SECOND_NAME
from benchmarks.execution import breakdown, compiling, operators
from benchmarks.execution.breakdown import Profile
from benchmarks.execution.compiling import Compilation
from benchmarks.execution.operators import Small
from benchmarks.rates import memcpy_rate
from benchmarks.sharing import crowd, hostile, jobs, packing, resizing, turns
from benchmarks.sharing.crowd import Crowd
from benchmarks.sharing.hostile import Attack
from benchmarks.sharing.jobs import JobMemory, JobSteps
from benchmarks.sharing.packing import Pair
from benchmarks.sharing.resizing import Standstill
from benchmarks.sharing.turns import BenchmarkTurns
from benchmarks.states import disk, moves, notebooks, saving
from benchmarks.states.disk import Disk
from benchmarks.states.moves import Moves
from benchmarks.states.notebooks import BenchmarkNotebooks
from benchmarks.states.saving import Snapshots
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Stop
from kernelproxy.criu.mode_probe import VARIABLE as CRIU
from kernelproxy.native import build

ROOT = Path(__file__).resolve().parents[1]
#: What was measured on machines that had a GPU for a short time, written by hand.
GPU_FIGURES = ROOT / "benchmarks" / "gpu" / "FIGURES.md"
RUNNER = Path(__file__).with_name("runner.py")
PROGRAMS = (
    "tiny", "mlp", "cnn", "resnet", "transformer", "lstm", "gru", "gpt2", "llama", "bert", "vit",
    "gan", "mixed precision", "recommender", "bert inference", "resnet inference",
    "unet inference", "gpt2 generation", "llama generation", "prompt lookup", "svi",
    "graph network", "trainer", "save and load",
)  # fmt: skip
GIB = 1 << 30
CELL_STEPS = 5
PARTS = (
    "programs",
    "operators",
    "profile",
    "snapshots",
    "moves",
    "disk",
    "notebooks",
    "packing",
    "turns",
    "crowd",
    "hostile",
    "jobs",
    "memory",
    "resizes",
    "compile",
)


@dataclass(frozen=True)
class Scale:
    """Size of the measurements.

    Parameters
    ----------
    small : bool
        Tiny models.
    rounds : int
    round_seconds : float
    small_things : tuple of (int, int, float)
        Bursts of each small operator; numbers that are read; seconds of idle time.
    counted : int
        Steps of each program that are counted.
    held : tuple of (int, int)
        Bytes of the states that are moved, and the number of moves.
    saved : tuple of str
        Programs with which snapshots are measured.
    snapshots : int
        Number for each program.
    turns : tuple of (float, int)
        Seconds for which two users train side by side; cells of each pair of users.
    packing : tuple of (float, float)
        Seconds until the scheduler has decided whether to pack a pair, and seconds observed.
    crowd : tuple of (int, float)
        Notebooks that start at the same time, and seconds for which they run cells.
    hostile : tuple of (float, int, int or None)
        Seconds of each attack by another user, rounds, and number of attacks; None: all.
    jobs : tuple of (int, tuple)
        Steps of each job of several ranks, and where they run.
    job_memory : tuple of (int, int)
        Ranks of the job whose memory is measured, and the width of its model.
    resized : tuple of int
        MiB on each rank of jobs whose number of devices changes.
    compilations : int
        First calls of a compiled model on each side.
    """

    small: bool = False
    rounds: int = 9
    round_seconds: float = 0.5
    small_things: tuple[int, int, float] = (21, 10_000, 10.0)
    counted: int = 20
    held: tuple[tuple[int, int], ...] = ((GIB, 3), (GIB // 4, 5))
    saved: tuple[str, ...] = ("frozen", "large", "experts")
    snapshots: int = 5
    turns: tuple[float, int] = (60.0, 24)
    packing: tuple[float, float] = (20.0, 20.0)
    crowd: tuple[int, float] = (8, 60.0)
    hostile: tuple[float, int, int | None] = (2.0, 2, None)
    jobs: tuple[int, jobs.Places] = (60, jobs.PLACES)
    job_memory: tuple[int, int] = (4, 4096)
    resized: tuple[int, ...] = (64, 256)
    compilations: int = 3


SMALL = Scale(
    small=True,
    rounds=3,
    round_seconds=0.02,
    small_things=(2, 100, 0.5),
    counted=2,
    held=((GIB // 16, 2),),
    saved=("large",),
    snapshots=1,
    turns=(3.0, 2),
    packing=(0.5, 1.0),
    crowd=(2, 1.0),
    hostile=(0.2, 1, 1),
    jobs=(2, ((1, 1), (2, 1))),
    job_memory=(2, 512),
    resized=(1,),
    compilations=1,
)


@dataclass(frozen=True)
class Row:
    """One program with some number of compute threads; milliseconds per step."""

    program: str
    threads: str
    plain: float
    proxied: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass
class Results:
    """All measurements of one run."""

    rows: list[Row] = field(default_factory=list)
    small: Small | None = None
    profiles: list[Profile] = field(default_factory=list)
    snapshots: list[Snapshots] = field(default_factory=list)
    moves: list[Moves] = field(default_factory=list)
    disk: list[Disk] = field(default_factory=list)
    notebooks: BenchmarkNotebooks | None = None
    turns: BenchmarkTurns | None = None
    packing: list[Pair] = field(default_factory=list)
    crowd: Crowd | None = None
    hostile: list[Attack] = field(default_factory=list)
    jobs: list[JobSteps] = field(default_factory=list)
    job_memory: JobMemory | None = None
    standstills: list[Standstill] = field(default_factory=list)
    compilation: Compilation | None = None
    memcpy_gb_per_second: float = 0.0


class Side:
    """A runner process that executes orders."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._process.stdin
        assert self._process.stdout
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send an order and return the answer.

        Raises
        ------
        RuntimeError
            The process ended instead of answering.
        """
        self._orders.write(json.dumps({"do": do, **arguments}) + "\n")
        self._orders.flush()
        for line in self._answers:
            if line.startswith("{"):  # libraries print, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the runner ended with status {self._process.wait()}")


@contextmanager
def sides(threads: int | None, scale: Scale) -> Iterator[tuple[Side, Side]]:
    """Start a plain and a proxied runner; `threads` None leaves the defaults of both."""
    with (
        daemon_of_its_own(threads),
        plain_side(scale) as first,
        proxied_side(NAME, scale) as second,
    ):
        yield first, second


def plain_side(scale: Scale) -> Side:
    """Start a runner without the proxy."""
    return Side([sys.executable, str(RUNNER), "--device", "cpu", *_options(scale)])


def proxied_side(name: str, scale: Scale) -> Side:
    """Start a runner under a session of that name."""
    return Side([
        sys.executable, "-m", "jupyter_sing.cli", "run", "--name", name,
        str(RUNNER), "--device", "cuda", *_options(scale),
    ])  # fmt: skip


def _options(scale: Scale) -> list[str]:
    return ["--small"] if scale.small else []


@contextmanager
def daemon_of_its_own(threads: int | None, **settings: str) -> Iterator[Path]:
    """Set new directories, threads and settings in the environment; stop the daemon at the end.

    Parameters
    ----------
    threads : int or None
        Compute threads; None leaves the default.
    **settings : str
        Values of variables without their prefix ``JUPYTER_SING_``.

    Yields
    ------
    Path
        ``JUPYTER_SING_DATA_DIR``.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith(("SING_", "JUPYTER_SING_", "OMP_", "MKL_")):
            del os.environ[name]
    os.environ["PYTHONPATH"] = str(ROOT)
    device = "cpu:4GiB"
    if threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        device += f"@{threads}"
    os.environ["JUPYTER_SING_DEVICES"] = f"{device},{device}"
    os.environ |= {f"JUPYTER_SING_{name}": value for name, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="sing-bench-") as directory:
        data = Path(directory) / "data"
        os.environ["JUPYTER_SING_RUNTIME_DIR"] = directory
        os.environ["JUPYTER_SING_DATA_DIR"] = str(data)
        try:
            yield data
        finally:
            _stop_daemon()
            os.environ.clear()
            os.environ.update(before)


def _stop_daemon() -> None:
    try:
        with agent_client.connect(start=False) as connection:
            connection.call(Stop(), timeout=60)
    except agent_client.ControlError as error:
        if error.reason != "no-daemon":
            raise


def measure(plain: Side, proxied: Side, program: str, threads: str, scale: Scale) -> Row:
    """Run a program on both sides in turns; the side that begins alternates."""
    both = (plain, proxied)
    for side in both:
        side.order("train", program=program, steps=3)  # models are made, caches filled
    once = max(side.order("train", program=program, steps=3)["seconds"] / 3 for side in both)
    steps = max(3, round(scale.round_seconds / once))
    times: dict[Side, list[float]] = {plain: [], proxied: []}
    for index in range(scale.rounds):
        for side in both if index % 2 else reversed(both):
            seconds = side.order("train", program=program, steps=steps)["seconds"]
            times[side].append(seconds / steps * 1e3)
    for side in both:
        side.order("forget")
    ratios = sorted(b / a for a, b in zip(times[plain], times[proxied], strict=True))
    quarter = len(ratios) // 4
    return Row(
        program=program,
        threads=threads,
        plain=statistics.median(times[plain]),
        proxied=statistics.median(times[proxied]),
        ratio=statistics.median(ratios),
        ratio_low=ratios[quarter],
        ratio_high=ratios[-1 - quarter],
    )


def measure_disk(scale: Scale) -> list[Disk]:
    """Measure the spill and resume of states, under a daemon that spills at once."""
    with (
        daemon_of_its_own(1, COLD_AFTER="0.001") as data,
        proxied_side(NAME, scale) as one,
        proxied_side(SECOND_NAME, scale) as other,
    ):
        return [disk.measure_disk(one, other, data, count, times) for count, times in scale.held]


def measure_turns(scale: Scale) -> BenchmarkTurns:
    """Measure users who share one device."""

    def start(name: str) -> Side:
        return proxied_side(name, scale)

    with daemon_of_its_own(1):
        os.environ["JUPYTER_SING_DEVICES"] = "cpu:2GiB@1"
        return turns.measure_turns(start, *scale.turns, steps=CELL_STEPS)


def measure_crowd(scale: Scale) -> Crowd:
    """Measure notebooks that start at the same time."""
    with daemon_of_its_own(1):
        os.environ["JUPYTER_SING_DEVICES"] = crowd.devices()
        return crowd.measure_crowd(lambda name: proxied_side(name, scale), *scale.crowd)


def measure_compilation(scale: Scale) -> Compilation:
    """Measure the first compilation of a model."""
    return compiling.measure_compilation(
        lambda: daemon_of_its_own(None),
        lambda: plain_side(scale),
        lambda: proxied_side(NAME, scale),
        scale.compilations,
    )


@contextmanager
def daemon_for_pairs(threads: int, pack: bool) -> Iterator[None]:
    """Start a daemon with one device; `pack` allows packing sessions on it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as policy:
        policy.write(f"defaults: {{packing: {str(pack).lower()}}}\n")
        policy.flush()
        with daemon_of_its_own(threads, POLICY=policy.name):
            os.environ["JUPYTER_SING_DEVICES"] = f"cpu:2GiB@{threads}"
            yield


@contextmanager
def daemon_for_jobs(devices: int) -> Iterator[None]:
    """Start a daemon with so many devices of one thread."""
    with daemon_of_its_own(1):
        os.environ["JUPYTER_SING_DEVICES"] = ",".join(["cpu:2GiB@1"] * devices)
        yield


def measure_packing(scale: Scale) -> list[Pair]:
    """Measure two programs on one device."""

    def start(name: str) -> Side:
        return proxied_side(name, scale)

    return packing.measure_packing(daemon_for_pairs, start, *scale.packing)


def run(
    scale: Scale,
    programs: Sequence[str] = PROGRAMS,
    threads: Sequence[int | None] = (1, None),
    parts: Sequence[str] = PARTS,
) -> Results:
    """Measure everything, or some parts of it; each result is printed at once."""
    results = Results(memcpy_gb_per_second=memcpy_rate())
    print(f"copying memory: {results.memcpy_gb_per_second:.1f} GB/s")
    if "programs" in parts:
        print(
            f"{'program':<18}{'threads':>12}{'plain ms':>11}{'proxied ms':>12}{'ratio':>8}"
            "  quartiles"
        )
    for count in threads if "programs" in parts else threads[:1]:
        with sides(count, scale) as (plain, proxied):
            if "programs" in parts:
                results.rows += measure_programs(plain, proxied, programs, count, scale)
            if count == threads[0]:
                measure_details(results, plain, proxied, programs, parts, scale)
    if "disk" in parts:
        results.disk = measure_disk(scale)
        _show(disk.report(results.disk))
    if "notebooks" in parts and not (CRIU in os.environ or shutil.which("criu")):
        print(f"notebooks were left out: there is no CRIU, which {CRIU} may name")
    elif "notebooks" in parts:
        criu = {each: os.environ[each] for each in (CRIU,) if each in os.environ}
        with daemon_of_its_own(1):
            os.environ |= criu
            results.notebooks = notebooks.measure_notebooks(*scale.held[0])
        _show(notebooks.report(results.notebooks))
    if "turns" in parts:
        results.turns = measure_turns(scale)
        _show(turns.report(results.turns))
    if "packing" in parts:
        results.packing = measure_packing(scale)
        _show(packing.report(results.packing))
    if "crowd" in parts:
        results.crowd = measure_crowd(scale)
        _show(crowd.report(results.crowd))
    if "hostile" in parts and os.getuid() != 0:
        print("hostile connections were left out: only root can be several users")
    elif "hostile" in parts:
        results.hostile = hostile.measure_hostile(*scale.hostile)
        _show(hostile.report(results.hostile))
    if "jobs" in parts:
        results.jobs = list(jobs.measure_jobs(daemon_for_jobs, *scale.jobs))
        _show(jobs.report(results.jobs))
    if "memory" in parts:
        results.job_memory = jobs.measure_memory(daemon_for_jobs, *scale.job_memory)
        _show(jobs.report_memory(results.job_memory))
    if "resizes" in parts:
        results.standstills = list(resizing.measure_standstills(daemon_for_jobs, scale.resized))
        _show(resizing.report(results.standstills))
    if "compile" in parts:
        results.compilation = measure_compilation(scale)
        _show(compiling.report(results.compilation))
    return results


def measure_details(
    results: Results,
    plain: Side,
    proxied: Side,
    programs: Sequence[str],
    parts: Sequence[str],
    scale: Scale,
) -> None:
    """Measure what needs no more than one number of threads, with the runners of `sides`."""
    if "operators" in parts:
        results.small = operators.measure_small(plain, proxied, *scale.small_things)
        _show(operators.report(results.small))
    if "profile" in parts:
        for program in programs:
            found = breakdown.measure_profile(proxied, program, scale.counted)
            results.profiles.append(found)
        _show(breakdown.report(results.profiles))
    if "snapshots" in parts:
        for program in scale.saved:
            results.snapshots.append(saving.measure_snapshots(proxied, program, scale.snapshots))
        _show(saving.report(results.snapshots))
    if "moves" in parts:
        for held, times in scale.held:
            results.moves.append(moves.measure_moves(proxied, held, times))
        _show(moves.report(results.moves))


def measure_programs(
    plain: Side, proxied: Side, programs: Sequence[str], threads: int | None, scale: Scale
) -> Iterator[Row]:
    """Measure one program after the other, and print each row."""
    label = str(threads) if threads else f"{plain.order('threads')['threads']} (default)"
    for program in programs:
        row = measure(plain, proxied, program, label, scale)
        print(
            f"{row.program:<18}{row.threads:>12}{row.plain:>11.2f}{row.proxied:>12.2f}"
            f"{row.ratio:>8.2f}  {row.ratio_low:.2f} to {row.ratio_high:.2f}",
            flush=True,
        )
        yield row


def _show(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def report(results: Results) -> str:
    """Write the results as the page BENCHMARKS.md."""
    facts = machine()
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Each row compares a program on the proxied software device",
        "with the same program on plain torch's CPU, both with the same number of compute",
        "threads, taking turns in one run; the loss is fetched every tenth step. The ratio is the",
        "median over the rounds; below 1 the proxied program is the faster one, because its",
        "Python and autograd run beside the execution in the worker.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "| program | threads | plain, ms/step | proxied, ms/step | ratio | quartiles |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.program} | {row.threads} | {row.plain:.2f} | {row.proxied:.2f} "
        f"| **{row.ratio:.2f}** | {row.ratio_low:.2f} to {row.ratio_high:.2f} |"
        for row in results.rows
    ]
    if results.small is not None:
        lines += ["", "## Small things", "", *operators.report(results.small)]
    if results.profiles:
        lines += ["", "## Where the time goes", "", *breakdown.report(results.profiles)]
    lines += [
        "",
        "## Snapshots, resuming, migration, disk",
        "",
        "With one compute thread. One thread of this machine copies memory at "
        f"{results.memcpy_gb_per_second:.1f} GB/s.",
        "",
        *saving.report(results.snapshots),
        "",
        *moves.report(results.moves),
        "",
        *disk.report(results.disk),
        "",
    ]
    if results.notebooks is not None:
        lines += ["## Notebooks", "", *notebooks.report(results.notebooks), ""]
    if results.turns is not None:
        lines += ["## Users who share a device", "", *turns.report(results.turns), ""]
    if results.packing:
        lines += ["## Programs that share a device at once", "", *packing.report(results.packing)]
        lines += [""]
    if results.crowd is not None:
        lines += ["## Notebooks that start at once", "", *crowd.report(results.crowd), ""]
    if results.hostile:
        lines += ["## Another user who means harm", "", *hostile.report(results.hostile), ""]
    if results.jobs:
        lines += ["## Jobs of several ranks", "", *jobs.report(results.jobs), ""]
    if results.job_memory is not None:
        lines += ["## Memory of a job", "", *jobs.report_memory(results.job_memory), ""]
    if results.standstills:
        lines += ["## Jobs that are resized", "", *resizing.report(results.standstills), ""]
    if results.compilation is not None:
        lines += ["## First compilation", "", *compiling.report(results.compilation), ""]
    lines += ["## On a GPU", "", GPU_FIGURES.read_text(encoding="utf-8")]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """Return date, machine and versions."""
    model = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or "unknown",
        "hardware": f"{model}, {len(os.sched_getaffinity(0))} CPUs",
        "versions": f"torch {build.describe().version}, Python {platform.python_version()}, "
        f"Linux {platform.release()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write BENCHMARKS.md, append results")
    parser.add_argument("--small", action="store_true", help="tiny models and few rounds")
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="PART",
        help=f"one of {', '.join(PARTS)}; may be given again; nothing is written then",
    )  # fmt: skip
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs all parts")
    parts = options.only or PARTS
    results = run(SMALL if options.small else Scale(), options.programs, parts=parts)
    if options.write:
        (ROOT / "BENCHMARKS.md").write_text(report(results), encoding="utf-8")
        with open(ROOT / "benchmarks" / "results.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps({**machine(), **asdict(results)}), file=file)


if __name__ == "__main__":
    main()
