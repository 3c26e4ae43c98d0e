"""Step: workers that are killed in the middle of a training."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

from benchmarks.daemon import session
from benchmarks.gpu.judging import judged
from benchmarks.gpu.processes import FailedError, Suite

STEPS, KILLS = 40, 3
#: Losses that are closer than this are "close": kernels without a fixed order of additions.
CLOSE = 1e-2


def kills(suite: Suite) -> tuple[str, list[str], Any]:
    """Kill the worker during trainings; say whether the losses are equal, close, or lost."""
    names = [("transformer", True), ("routed", False)]
    rows, wrong = [], {}
    for name, autocast in names:
        losses = {}
        for label in ("undisturbed", "again", "killed"):
            try:
                losses[label] = _train(suite, name, autocast, KILLS if label == "killed" else 0)
            except FailedError as error:
                wrong[f"{name} {label}"] = str(error)
                break
        else:
            floor = _apart(losses["undisturbed"], losses["again"])
            apart = _apart(losses["undisturbed"], losses["killed"])
            verdict = "equal" if apart == 0 else "close" if apart < CLOSE else "different"
            rows.append(f"| {name} | {floor:.1e} | {apart:.1e} | {verdict} |")
            if apart > max(CLOSE, 10 * floor) or (apart and not suite.gpu):
                wrong[name] = f"losses differ by {apart:.1e}, undisturbed runs by {floor:.1e}"
    table = ["| training | two undisturbed runs differ by | after kills | |", "|---|---|---|---|"]
    table += rows
    try:
        return judged(len(names), wrong), table, None
    except FailedError as error:
        raise FailedError(str(error), table) from None


def _train(suite: Suite, name: str, autocast: bool, kills: int) -> list[float]:
    """Train in a new session, and kill its worker so many times; return the losses."""
    losses: list[float] = []
    with suite.daemon(suite.devices()) as env, suite.side(env, proxied=True) as side:
        side.order("touch")  # there is a session, and a worker
        part = STEPS // (KILLS + 1)
        for index in range(KILLS + 1):
            over = threading.Event()
            killer = threading.Thread(target=_kill_once, args=(over,))
            if index < kills:
                killer.start()
            try:
                found = side.order("losses", program=name, steps=part, autocast=autocast)
            finally:
                over.set()
                if index < kills:
                    killer.join()
            losses += [float.fromhex(loss) for loss in found["losses"]]
    return losses


def _kill_once(over: threading.Event) -> None:
    """Kill the worker as soon as there is one, unless the steps are over."""
    while not over.wait(0.01):
        pid = session("suite")["worker_pid"]
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return


def _apart(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference of two lists."""
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(one, other, strict=True))
