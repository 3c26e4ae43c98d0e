"""What the proxy costs: paired measurements against plain torch, `make bench`.

For every program two processes live side by side, one on the CPU and one on a proxied software
device with as many compute threads. They take turns, round by round, so that both meet the same
moods of the machine; the figure is the median of the rounds' ratios. Below 1, the proxied program
is the faster one: its Python and autograd overlap with the execution in the worker.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import moves
from benchmarks.moves import Moves, Snapshots
from kernelproxy import control, native
from kernelproxy.protocol import Stop

ROOT = Path(__file__).resolve().parents[1]
RUNNER = Path(__file__).with_name("runner.py")
PROGRAMS = ("mlp", "cnn", "transformer", "lstm", "gru", "gpt2", "gpt2 generation")
GIB = 1 << 30


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    small: bool = False
    rounds: int = 9
    round_seconds: float = 0.5
    held_bytes: tuple[int, ...] = (GIB, GIB // 4)
    moves: int = 3
    saved: tuple[str, ...] = ("frozen", "large")


SMALL = Scale(
    small=True, rounds=3, round_seconds=0.02, held_bytes=(GIB // 16,), moves=1, saved=("large",)
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
    """All that one run measured."""

    rows: list[Row] = field(default_factory=list)
    snapshots: list[Snapshots] = field(default_factory=list)
    moves: list[Moves] = field(default_factory=list)
    memcpy_gb_per_second: float = 0.0


class Side:
    """A runner process that takes orders."""

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
        """Have it done, and return the answer.

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
    options = ["--small"] if scale.small else []
    plain = [sys.executable, str(RUNNER), "--device", "cpu", *options]
    proxied = [
        sys.executable, "-m", "jupyter_sing.cli", "run", "--name", "bench",
        str(RUNNER), "--device", "cuda", *options,
    ]  # fmt: skip
    with _daemon_of_its_own(threads), Side(plain) as first, Side(proxied) as second:
        yield first, second


@contextmanager
def _daemon_of_its_own(threads: int | None) -> Iterator[None]:
    """Name a new runtime directory and the threads in the environment; stop the daemon after."""
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
    with tempfile.TemporaryDirectory(prefix="sing-bench-") as directory:
        os.environ["JUPYTER_SING_RUNTIME_DIR"] = directory
        try:
            yield
        finally:
            _stop_daemon()
            os.environ.clear()
            os.environ.update(before)


def _stop_daemon() -> None:
    try:
        with control.connect(start=False) as connection:
            connection.call(Stop(), timeout=60)
    except control.ControlError as error:
        if error.reason != "no-daemon":
            raise


def measure(plain: Side, proxied: Side, program: str, threads: str, scale: Scale) -> Row:
    """Let both sides take turns at a program, beginning with either in turn."""
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


def memcpy_rate() -> float:
    """Bytes copied per nanosecond by one thread between warm buffers: the machine's own speed."""
    source = bytearray(os.urandom(1 << 20) * 256)
    target = bytearray(len(source))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - begin)
    return len(source) / min(seconds) / 1e9


def run(
    scale: Scale, programs: Sequence[str] = PROGRAMS, threads: Sequence[int | None] = (1, None)
) -> Results:
    """Measure everything; a row is printed as soon as it is there."""
    results = Results(memcpy_gb_per_second=memcpy_rate())
    print(
        f"{'program':<18}{'threads':>12}{'plain ms':>11}{'proxied ms':>12}{'ratio':>8}  quartiles"
    )
    for count in threads:
        with sides(count, scale) as (plain, proxied):
            label = str(count) if count else f"{plain.order('threads')['threads']} (default)"
            for program in programs:
                row = measure(plain, proxied, program, label, scale)
                results.rows.append(row)
                print(
                    f"{row.program:<18}{row.threads:>12}{row.plain:>11.2f}{row.proxied:>12.2f}"
                    f"{row.ratio:>8.2f}  {row.ratio_low:.2f} to {row.ratio_high:.2f}",
                    flush=True,
                )
            if count == threads[0]:
                results.snapshots = [moves.measure_snapshots(proxied, p) for p in scale.saved]
                results.moves = [
                    moves.measure_moves(proxied, count, scale.moves) for count in scale.held_bytes
                ]
                print("\n".join(moves.report(results.snapshots, results.moves)), flush=True)
    print(f"copying memory: {results.memcpy_gb_per_second:.1f} GB/s")
    return results


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
    lines += [
        "",
        "## Snapshots, resuming, migration",
        "",
        "With one compute thread. One thread of this machine copies memory at "
        f"{results.memcpy_gb_per_second:.1f} GB/s.",
        "",
        *moves.report(results.snapshots, results.moves),
        "",
    ]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """Say when, on what, and with which versions."""
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
        "versions": f"torch {native.describe().version}, Python {platform.python_version()}, "
        f"Linux {platform.release()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write BENCHMARKS.md, append results")
    parser.add_argument("--small", action="store_true", help="tiny models and few rounds")
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    options = parser.parse_args()
    results = run(SMALL if options.small else Scale(), options.programs)
    if options.write:
        (ROOT / "BENCHMARKS.md").write_text(report(results), encoding="utf-8")
        with open(ROOT / "benchmarks" / "results.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps({**machine(), **asdict(results)}), file=file)


if __name__ == "__main__":
    main()
