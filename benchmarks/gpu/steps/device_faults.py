"""Step: a kernel that fails an assertion, read or unread, costs its operator alone."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.daemon import session
from benchmarks.gpu.judging import judged, objects, verb, workers_of
from benchmarks.gpu.processes import FailedError, GpuProcessSide, Suite
from kernelproxy.common.protocol import Resume, Suspend

#: The first worker, and at most two careful replays and the one that continues.
WORKERS_MAX = 4
IDLE_SECONDS = 12.0
#: Small operators, how often they are issued, as other processes interrupt that, and how much
#: slower they may be after a fault: careful replay must have ended.
OPERATORS, TIMES, SLOWER = 2000, 50, 1.5


def _small_operators(side: GpuProcessSide) -> float:
    """Return microseconds until a small operator is completed, the best of several."""
    side.order("issue", operator="add", count=OPERATORS)
    rounds = (side.order("issue", operator="add", count=OPERATORS) for _ in range(TIMES))
    return min(found["completed"] for found in rounds) / OPERATORS * 1e6


def _one(side: GpuProcessSide, kind: str, then: str, suite: Suite) -> dict[str, Any]:
    """Cause a fault; return the workers that it took, the error's text and the seconds."""
    began = time.monotonic()
    with workers_of("suite") as pids:
        raised = side.order("fault", kind=kind)["raised"]
        if then == "idle":
            time.sleep(2.0 if suite.small else IDLE_SECONDS)
        elif then == "suspend":
            identifier = session("suite")["id"]
            verb(Suspend(identifier, "gpu suite"), suite)
            verb(Resume(identifier), suite)
        found = side.order("kept")
        found["raised"] = raised or found["raised"]
        seconds = time.monotonic() - began
    return {**found, "workers": len(pids), "seconds": seconds}


def faults(suite: Suite) -> tuple[str, list[str], Any]:
    """Check faults that are read, unread, before a suspension, and in compiled graphs."""
    cases = [("read", ""), ("unread", "idle"), ("unread", "suspend"), ("compiled", "")]
    rows, wrong, count = [], {}, 0
    with suite.daemon(suite.devices()) as env:
        printed = suite.run(*suite.proxied("tests/programs/operators/faults.py"), env=env)
        for each in objects(printed):
            count += 1
            if each["error"]:
                wrong[each["name"]] = each["error"]
        with suite.side(env, proxied=True) as side:
            side.order("kept")
            before = _small_operators(side)
            for kind, then in cases:
                name, count = f"{kind} {then}".strip(), count + 1
                try:
                    found = _one(side, kind, then, suite)
                except FailedError as error:
                    wrong[name] = str(error)
                    break
                rows.append(
                    f"| {name} | {found['workers']} | {found['seconds']:.1f} "
                    f"| {found['raised'][:120].splitlines()[0] if found['raised'] else ''} |"
                )
                # An operator that suspends loses its first worker, too.
                most = WORKERS_MAX + (then == "suspend")
                if not found["intact"]:
                    wrong[name] = "other tensors are not what they were"
                elif found["workers"] > most:
                    wrong[name] = f"{found['workers']} workers were started"
                elif not found["raised"]:
                    wrong[name] = "nothing was raised"
            else:
                after = _small_operators(side)
                if after > before * SLOWER:
                    wrong["afterwards"] = f"an operator takes {after:.1f} µs, {before:.1f} before"
    table = ["| fault | workers | seconds | raised |", "|---|---|---|---|", *rows]
    try:
        return judged(count, wrong), table, None
    except FailedError as error:
        raise FailedError(str(error), table) from None
