"""Step: two users train on the device in turns."""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.gpu.judging import need
from benchmarks.gpu.processes import GpuProcessSide, Suite
from benchmarks.sharing.turns import measure_turns, report


def turns(suite: Suite) -> tuple[str, list[str], Any]:
    """Measure how equally two users share the device, and how long a cell of one waits."""
    need("pydantic", "yaml")  # for a policy
    seconds, count = (3.0, 2) if suite.small else (8.0, 4)
    with suite.daemon(suite.devices()) as env:

        def start(name: str) -> AbstractContextManager[GpuProcessSide]:
            return suite.side(env, proxied=True, name=name)

        found = measure_turns(start, seconds, count, 2, pairs=(("basic", "premium"),))
    one, two = found.equality.served
    waits = found.cells[0].waits
    text = f"{one:.1f} s and {two:.1f} s of {seconds:.0f} s; a premium cell waits "
    text += f"{statistics.median(waits) * 1e3:.0f} ms, at most {waits[-1] * 1e3:.0f} ms"
    return text, report(found), None
