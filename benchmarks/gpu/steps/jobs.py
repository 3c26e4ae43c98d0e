"""Step: the ranks of a job on one device: their collectives, their weights, and their steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.judging import judged, objects, status
from benchmarks.gpu.processes import FailedError, LateError, Suite
from kernelproxy.common.errors import ControlError

CHECKS = "tests/programs/collectives/checks.py"
TRAINING = "tests/programs/jobs/ranks.py"
PACE = "benchmarks/sharing/rank.py"
#: Steps of a training, and seconds between the deaths of a worker in it.
STEPS, KILL_SECONDS = 40, 3.0
PACE_RANKS, PACE_STEPS = (1, 4), 50


def _run(suite: Suite, ranks: int, program: str, *arguments: str, label: str = "") -> list[str]:
    """Run a job in a daemon of its own; return the lines of its output."""
    with suite.daemon(suite.devices()) as env:
        command = suite.proxied("--nproc-per-node", str(ranks), program, *arguments)
        # A port for the program's own store.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        name = label or f"{Path(program).stem}-{ranks}"
        return suite.run(*command, env=env, label=name).splitlines()


class _Kills:
    """Kills a worker of a job every few seconds, in the block."""

    def __init__(self) -> None:
        self.count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill)

    def __enter__(self) -> _Kills:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _kill(self) -> None:
        while not self._over.wait(KILL_SECONDS):
            # There is no daemon yet, or no more.
            with contextlib.suppress(ControlError, OSError):
                workers = [each["worker_pid"] for each in status().sessions if each["worker_pid"]]
                for pid in workers[self.count % 2 :][:1]:
                    os.kill(pid, signal.SIGKILL)
                    self.count += 1


def _weights(lines: Sequence[str]) -> set[str]:
    return {line.split()[-1] for line in lines if " weights " in line}


def ranks(suite: Suite) -> tuple[str, list[str], Any]:
    """Check weights and collectives of two ranks, and measure the steps of up to four."""
    wrong: dict[str, str] = {}
    figures: dict[str, Any] = {"steps": {}}
    table = ["| ranks | ms/step | of the ideal |", "|---|---|---|"]
    try:
        calm = _weights(_run(suite, 2, TRAINING, "gpt2", str(STEPS), "1", label="calm"))
        with _Kills() as kills:
            killed = _weights(_run(suite, 2, TRAINING, "gpt2", str(STEPS), "1", label="killed"))
        figures |= {"kills": kills.count, "equal": killed == calm}
        if len(calm) != 1:
            wrong["ranks"] = f"they have different weights: {calm}"
        if len(killed) != 1:
            wrong["ranks after kills"] = f"they have different weights: {killed}"
        if killed != calm and not suite.gpu:
            wrong["killed"] = f"kills show in the weights: {calm}, {killed}"
        figures["checks"] = len(set(_run(suite, 2, CHECKS)))
        for count in PACE_RANKS:
            (found,) = objects("\n".join(_run(suite, count, PACE, "cuda", str(PACE_STEPS))))
            figures["steps"][count] = step = found["step"]
            ideal = step / figures["steps"][1] / count
            table.append(f"| {count} | {step * 1e3:.1f} | {ideal:.2f} |")
    except (FailedError, TimeoutError) as error:
        kind = FailedError if isinstance(error, FailedError) or wrong else LateError
        raise kind(f"{wrong or ''} {error}; so far {figures}", table, figures) from None
    after = "the same" if figures["equal"] else "other"
    text = f"{figures['checks']} checks of collectives; {after} weights after {kills.count} kills; "
    return f"{text}{judged(2, wrong)}", table, figures
