"""A suite for machines with a GPU, in one run: see `gpu_suite.sh`.

The steps come in the order of what they are worth, and each prints its verdict as soon as it is
known. Each has a part of the time: one that fails or takes longer is written down as that, and does
not keep the others from being tried. The results are three files: a table, the figures, the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import LateError, SkippedError, Suite
from benchmarks.gpu.steps.table import STEPS


@dataclass
class StepResult:
    """Outcome of a step: ``passed``, ``failed``, ``skipped``, or ``late`` (out of time)."""

    step: str
    state: str = "passed"
    seconds: float = 0.0
    text: str = ""
    table: list[str] = field(default_factory=list)
    figures: Any = None


def attempt(
    suite: Suite, name: str, seconds: float, function: Callable[[Suite], Any]
) -> StepResult:
    """Run one step."""
    outcome = StepResult(name)
    suite.step = name.replace(",", "")
    began = time.monotonic()
    suite.limit = min(began + seconds * suite.scale, suite.deadline)
    try:
        found = function(suite) if suite.limit - began > 5 else _too_late()
        if isinstance(found, tuple):
            outcome.text, outcome.table, outcome.figures = found
        else:
            outcome.text = found
    except SkippedError as error:
        outcome.state, outcome.text = "skipped", str(error)
    except TimeoutError as error:
        outcome.state, outcome.text = "late", str(error)
    except Exception as error:
        late = isinstance(error, LateError)
        outcome.state = "late" if late else "failed"
        outcome.text = str(error) if late else f"{type(error).__name__}: {error}"
        outcome.table = getattr(error, "table", [])
        outcome.figures = getattr(error, "figures", None)
    outcome.seconds = time.monotonic() - began
    return outcome


def _too_late() -> str:
    raise TimeoutError("no time was left")


def report(suite: Suite, outcomes: Sequence[StepResult]) -> str:
    """Write the outcomes as a page."""
    lines = ["# GPU suite", "", f"Written by `benchmarks/gpu_suite.sh` for {suite.device}.", ""]
    lines += ["| step | came to | seconds | |", "|---|---|---|---|"]
    for each in outcomes:
        text = each.text.replace("|", "/").replace("\n", " ")
        lines.append(f"| {each.step} | {each.state} | {each.seconds:.0f} | {text[:600]} |")
    for each in outcomes:
        if each.table:
            lines += ["", f"## {each.step.capitalize()}", "", *each.table]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_suite.sh", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu (default: cuda:0)")
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-suite"), type=Path)
    parser.add_argument("--seconds", default=520.0, type=float, help="for everything (520)")
    parser.add_argument("--small", action="store_true", help="tiny models and states")
    parser.add_argument("--only", nargs="*", help="some steps")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not options.only or step[0] in options.only]
    # Few steps have more time each.
    scale = max(1.0, options.seconds / sum(seconds for _, seconds, _ in steps))
    suite = Suite(options.device, options.small, out, options.seconds, scale)
    outcomes: list[StepResult] = []
    try:
        for name, seconds, function in steps:
            outcomes.append(attempt(suite, name, seconds, function))
            last = outcomes[-1]
            print(f"{last.state:>8} {last.seconds:5.0f} s  {last.step}: {last.text}", flush=True)
            # After each step, so that the results so far are kept if the run is ended.
            (out / "gpu_suite.md").write_text(report(suite, outcomes), encoding="utf-8")
            figures = {"date": time.strftime("%Y-%m-%d"), "steps": [asdict(o) for o in outcomes]}
            (out / "gpu_suite.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
            suite.pack()
    finally:
        shutil.rmtree(suite.scratch, ignore_errors=True)
    print()
    print(report(suite, outcomes), end="")
    return int(any(each.state in ("failed", "late") for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
