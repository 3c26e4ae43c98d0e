"""Steps: times of programs, of single operators and answers, and of compiled graphs."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from benchmarks.gpu.judging import judged
from benchmarks.gpu.processes import FailedError, GpuProcessSide, LateError, Suite

MIB = 1 << 20
PROGRAMS = ("mlp", "cnn", "transformer", "lstm", "gru")
TRANSFORMERS = ("gpt2", "gpt2 generation", "llama", "bert")
SMALL_OPERATORS, SCALARS = 3000, 1000


def programs(suite: Suite) -> tuple[str, list[str], Any]:
    """Compare programs on the proxied device with the same programs on plain torch."""
    names = [*(TRANSFORMERS if suite.transformers else ()), *PROGRAMS]
    rounds, round_seconds = (3, 0.05) if suite.small else (7, 0.3)
    rows: list[dict[str, Any]] = []
    wrong: dict[str, str] = {}
    left: list[str] = []
    with suite.daemon(suite.devices()) as env:
        with suite.side(env, proxied=False) as plain, suite.side(env, proxied=True) as other:
            singles = _singles(suite, plain, other)
        for name in names:
            if time.monotonic() > suite.limit - 8:
                left.append(name)
                continue
            try:
                # Each program has processes of its own, so a failure does not affect others.
                with (
                    suite.side(env, proxied=False) as plain,
                    suite.side(env, proxied=True) as other,
                ):
                    rows.append(_pair(name, plain, other, rounds, round_seconds))
            except FailedError as error:
                wrong[name] = str(error)
    table = [
        "| program | plain, ms/step | proxied, ms/step | ratio | quartiles | plain from plain "
        "| issued by Python in, plain | proxied | operators | records | KB | requests "
        "| client, µs/operator |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    table += [
        f"| {row['program']} | {row['plain']:.2f} | {row['proxied']:.2f} | **{row['ratio']:.2f}** "
        f"| {row['low']:.2f} to {row['high']:.2f} | {row['floor']:.2f} | {row['plain_issued']:.2f} "
        f"| {row['issued']:.2f} | {row['operators']:.0f} | {row['records']:.0f} "
        f"| {row['bytes'] / 1e3:.0f} | {row['requests']:.1f} "
        f"| {row['issued'] * 1e3 / max(row['operators'], 1):.1f} |"
        for row in rows
    ]
    ratios = [row["ratio"] for row in rows]
    text = f"median ratio {statistics.median(ratios):.2f}, " if ratios else ""
    text += f"worst {max(ratios):.2f}; " if ratios else ""
    figures = {"programs": rows, "singles": singles}
    table = [*_singles_table(singles), "", *table]
    try:
        text += judged(len(names) - len(left), wrong)
    except FailedError as error:
        raise FailedError(text + str(error), table, figures) from None
    if left:
        raise LateError(f"{text}; no time was left for {', '.join(left)}", table, figures)
    return text, table, figures


def _singles(suite: Suite, *sides: GpuProcessSide) -> list[dict[str, float]]:
    """Measure single operators, answers and an upload on both sides."""
    bytes = (4 if suite.small else 8192) * MIB
    found = []
    for side in sides:
        side.order("issue", operator="add", count=SMALL_OPERATORS)
        seconds = min(
            side.order("issue", operator="add", count=SMALL_OPERATORS)["seconds"] for _ in range(3)
        )
        answers = side.order("scalars", count=SCALARS)
        upload = side.order("upload", bytes=bytes)
        found.append(
            {
                "operator, µs": seconds / SMALL_OPERATORS * 1e6,
                "item(), µs": answers["median"],
                "model to the device, GB/s": upload["bytes"] / upload["seconds"] / 1e9,
            }
        )
    return found


def _singles_table(singles: list[dict[str, float]]) -> list[str]:
    plain, proxied = singles
    rows = [f"| {name} | {plain[name]:.1f} | {proxied[name]:.1f} |" for name in plain]
    return ["| what | plain | proxied |", "|---|---|---|", *rows]


def _pair(
    name: str, plain: GpuProcessSide, proxied: GpuProcessSide, rounds: int, round_seconds: float
) -> dict[str, Any]:
    """Run a program on both sides in turns; the side that begins alternates."""
    both = (plain, proxied)
    for side in both:
        side.order("train", program=name, steps=3)  # models are made, caches filled
    once = max(side.order("train", program=name, steps=3)["seconds"] / 3 for side in both)
    steps = max(3, round(round_seconds / once))
    times: dict[GpuProcessSide, list[float]] = {plain: [], proxied: []}
    for index in range(rounds):
        for side in both if index % 2 else reversed(both):
            seconds = side.order("train", program=name, steps=steps)["seconds"]
            times[side].append(seconds / steps * 1e3)
    ratios = sorted(b / a for a, b in zip(times[plain], times[proxied], strict=True))
    # Measure the time in which Python issues a few steps, which fit into the log.
    issues = {side: side.order("measure", program=name, steps=3) for side in both}
    sent = issues[proxied]
    return {
        "program": name,
        "plain": statistics.median(times[plain]),
        "proxied": statistics.median(times[proxied]),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
        # What plain torch differs from itself in this run.
        "floor": max(times[plain]) / min(times[plain]),
        "plain_issued": issues[plain]["issued"] / 3 * 1e3,
        "issued": sent["issued"] / 3 * 1e3,
        **{key: sent[key] / 3 for key in ("operators", "records", "bytes", "requests")},
    }


def compilation(suite: Suite) -> tuple[str, list[str], Any]:
    """Compile a small model on both sides; then once more with what is on disk."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=suite.scratch) as directory:
        for side in ("plain", "proxied"):
            for label in ("cold", "warm"):
                cache = {"TORCHINDUCTOR_CACHE_DIR": f"{directory}/{side}"}
                with (
                    suite.daemon(suite.devices(), **cache) as env,
                    suite.side(env, proxied=side == "proxied") as process,
                ):
                    process.order("touch")
                    found = process.order("train", program="compiled", steps=1)
                    seconds[f"{side}, {label}"] = found["seconds"]
    table = ["| first step of a compiled model | seconds |", "|---|---|"]
    table += [f"| {name} | {value:.1f} |" for name, value in seconds.items()]
    ratio = seconds["proxied, cold"] / seconds["plain, cold"]
    return f"cold, {ratio:.2f} of plain's time", table, seconds
