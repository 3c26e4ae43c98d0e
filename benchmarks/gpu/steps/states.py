"""Steps: a session's state leaves the device and returns, and is saved beside its execution."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.daemon import NAME, session
from benchmarks.gpu import nvml
from benchmarks.gpu.judging import verb
from benchmarks.gpu.processes import FailedError, Suite
from benchmarks.states.saving import measure_snapshots, report
from kernelproxy.common.protocol import Resume, Suspend

MIB = 1 << 20
#: Memory in use on the device that may differ before a session and after its suspension.
LEFT_BYTES_MAX = 64 * MIB


def moves(suite: Suite) -> tuple[str, list[str], Any]:
    """Suspend and resume a state; compare with the rates of copies of the same bytes."""
    bytes_held = (64 if suite.small else 8192) * MIB
    times = 2
    with suite.side(suite.environment(), proxied=False) as plain:
        rates = plain.order("copies", bytes=min(bytes_held, 1 << 30))
    before = nvml.view()["used"] if suite.gpu else 0
    rows: dict[str, list[float]] = {"suspend": [], "first": [], "kernels": [], "loaded": []}
    limit = "" if suite.gpu else "8GiB"
    left = 0
    with (
        # A context in advance would stay on the device, and hide what a new one costs.
        suite.daemon(suite.devices(limit), JUPYTER_SING_CONTEXT_POOL="0") as env,
        suite.side(env, proxied=True) as proxied,
    ):
        expected = proxied.order("hold", bytes=bytes_held)["sum"]
        proxied.order("touch")
        identifier = session("suite")["id"]
        for _ in range(times):
            proxied.order("rewrite")
            begin = time.perf_counter()
            verb(Suspend(identifier, "gpu suite"), suite)
            rows["suspend"].append(time.perf_counter() - begin)
            left = nvml.view()["used"] - before if suite.gpu else 0
            begin = time.perf_counter()
            verb(Resume(identifier), suite)
            proxied.order("touch")
            rows["first"].append(time.perf_counter() - begin)
            proxied.order("kernels")
            rows["kernels"].append(time.perf_counter() - begin)
            proxied.order("reach")
            rows["loaded"].append(time.perf_counter() - begin)
            if proxied.order("check")["sum"] != expected:
                raise FailedError("a session that was resumed does not hold what it held")
    middle = {name: statistics.median(seconds) for name, seconds in rows.items()}
    out, back = (bytes_held / middle[name] / 1e9 for name in ("suspend", "loaded"))
    parts = (out / rates["device to pinned"], back / rates["pinned to device"])
    table = [
        "| what | seconds | GB/s | of a pinned copy |",
        "|---|---|---|---|",
        f"| suspend {bytes_held // MIB} MiB, all changed | {middle['suspend']:.2f} | {out:.1f} "
        f"| {parts[0]:.0%} |",
        f"| resume until the first operator's answer | {middle['first']:.2f} | | |",
        f"| until the first matmul and convolution | {middle['kernels']:.2f} | | |",
        f"| until all is there | {middle['loaded']:.2f} | {back:.1f} | {parts[1]:.0%} |",
        *(f"| copy, {name} | | {rate:.1f} | |" for name, rate in rates.items()),
    ]
    text = f"suspend at {out:.1f} GB/s, resume at {back:.1f} GB/s"
    figures = {"rates": rates, **rows}
    if left > LEFT_BYTES_MAX:
        why = f"{text}; {left // MIB} MiB stay in use on the device after a suspension"
        raise FailedError(why, table, figures)
    return text, table, figures


def snapshots_beside(suite: Suite) -> tuple[str, list[str], Any]:
    """Train with Adam while the daemon takes snapshots; compare the steps with those without."""
    with (
        suite.daemon(suite.devices()) as env,
        suite.side(env, proxied=True, name=NAME) as proxied,
    ):
        found = measure_snapshots(proxied, "large", 2)
    lost = found.step_meanwhile / found.step - 1
    text = f"steps during a snapshot take {lost:.1%} longer; worst pause {found.worst_pause:.1%}"
    return text, report([found]), None
