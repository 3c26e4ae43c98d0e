"""Runs the samples in programs under device sessions, and outlives those programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance.refused import REFUSED

ROOT = Path(__file__).resolve().parents[2]
#: The same number of threads on both sides, since it decides how sums are split.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JUPYTER_SING_DEVICES": "cpu:4GiB@1"}


@dataclass
class Report:
    """Results of the samples.

    Parameters
    ----------
    passed, refused, failed : int
        Numbers of samples.
    failures : dict
        Failures, by operator and dtype.
    refusals : dict
        Messages of refusals that `REFUSED` does not list, by operator.
    """

    passed: int = 0
    refused: int = 0
    failed: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)
    refusals: dict[str, list[str]] = field(default_factory=dict)

    def add(self, result: dict[str, Any]) -> None:
        """Add the result of one operator and dtype."""
        name = result["name"]
        self.passed += result["passed"]
        self.refused += result["refused"]
        self.failed += result["failed"]
        if result["failures"]:
            self.failures[name] = result["failures"]
        operator = name.split()[0]
        if result["refusals"] and operator not in REFUSED:
            self.refusals[operator] = sorted(result["refusals"])

    @property
    def passing(self) -> float:
        """The share of samples that passed."""
        return self.passed / max(self.passed + self.refused + self.failed, 1)

    def lines(self) -> Iterator[str]:
        """Return the report as readable lines."""
        for name, texts in sorted(self.failures.items()):
            yield f"{name}:"
            yield from (f"    {text}" for text in texts[:5])
            if len(texts) > 5:
                yield f"    and {len(texts) - 5} more"
        for name, texts in sorted(self.refusals.items()):
            yield f"{name}: refused, and not in tests/conformance/refused.py: {texts[0]}"
        yield (
            f"samples: {self.passed} passed, {self.refused} refused, {self.failed} failed "
            f"({100 * self.passing:.2f} % passed)"
        )


def run(programs: int, arguments: Sequence[str]) -> Report:
    """Run all samples in `programs` processes at once, with these arguments of `program`."""
    report = Report()
    with ThreadPoolExecutor(programs) as pool:
        shards = [
            (f"--shard={shard}", f"--shards={programs}", *arguments) for shard in range(programs)
        ]
        for results in pool.map(lambda shard: list(run_shard(shard)), shards):
            for result in results:
                report.add(result)
    return report


def run_shard(arguments: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Run a program; if it dies, report the operator and start another program after that one."""
    done: list[str] = []
    with tempfile.TemporaryFile("w+") as stderr:
        while True:
            at = ""
            for result in _run_program([*arguments, "--skip", *done], stderr):
                if "begins" in result:
                    at = result["begins"]
                    continue
                done.append(result["name"])
                at = ""
                yield result
            if not at:
                break
            done.append(at)
            nothing = {"passed": 0, "refused": 0, "failed": 1, "refusals": {}}
            yield {"name": at, **nothing, "failures": ["the program ended: " + _end_of(stderr)]}
        if not done:
            raise RuntimeError("the program ran no operator: " + _end_of(stderr))


def _run_program(arguments: list[str], stderr: Any) -> Iterator[dict[str, Any]]:
    program = str(Path(__file__).with_name("program.py"))
    with subprocess.Popen(
        [sys.executable, "-m", "jupyter_sing.cli", "run", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **ONE_THREAD},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def _end_of(stderr: Any) -> str:
    stderr.seek(0)
    return stderr.read()[-2000:]
