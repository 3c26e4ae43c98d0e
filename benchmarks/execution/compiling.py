"""Time of a compiled model's first call: in new processes, without a cache on disk."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.daemon import DaemonSide

PROGRAM = "compiled"


@dataclass(frozen=True)
class Compilation:
    """Seconds until the result of the first call, with plain torch and on the proxied device.

    Parameters
    ----------
    plain, proxied : tuple of float
        One value for each round.
    """

    plain: tuple[float, ...]
    proxied: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.plain, self.proxied, strict=True))


def measure_compilation(
    surroundings: Callable[[], AbstractContextManager[object]],
    plain: Callable[[], AbstractContextManager[DaemonSide]],
    proxied: Callable[[], AbstractContextManager[DaemonSide]],
    rounds: int,
) -> Compilation:
    """Measure both sides in turns, each with an empty cache; the side that begins alternates.

    Parameters
    ----------
    surroundings : callable
        Makes a context for a new daemon.
    plain, proxied : callable
        Start a runner.
    rounds : int
    """
    times: dict[str, list[float]] = {"plain": [], "proxied": []}
    starts = {"plain": plain, "proxied": proxied}
    for index in range(rounds):
        for name in sorted(starts, reverse=bool(index % 2)):
            with tempfile.TemporaryDirectory(prefix="sing-bench-") as cache, surroundings():
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                with starts[name]() as side:
                    side.order("touch")  # the device is ready
                    found = side.order("train", program=PROGRAM, steps=1)
                    times[name].append(found["seconds"])
    return Compilation(tuple(times["plain"]), tuple(times["proxied"]))


def report(found: Compilation) -> list[str]:
    """Return the result as lines of Markdown."""

    def quoted(seconds: Sequence[float]) -> str:
        return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"

    return [
        "The first call and backward of a small model under `torch.compile`, each in a new process",
        "with inductor's cache on disk empty. Medians and ranges of so many rounds: "
        f"{len(found.plain)}.",
        "",
        "| plain, s | proxied, s | ratio |",
        "|---|---|---|",
        f"| {quoted(found.plain)} | {quoted(found.proxied)} | **{found.ratio:.2f}** |",
    ]
