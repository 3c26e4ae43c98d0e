"""Tries operators on the proxied device; run under a device session by `__main__`.

Prints one JSON object before and one after each operator and dtype.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from tests.conformance.trying import Refused, attempts, compare, wrong_samples

#: Timeout: one operator and dtype takes seconds, so what takes this long hangs.
SECONDS_MAX = 600


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--dtypes", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    options = parser.parse_args()
    assert torch.zeros(1, device="cuda").is_cuda
    for index, (op, dtype) in enumerate(work(options)):
        name = f"{op.formatted_name} {str(dtype).removeprefix('torch.')}"
        if index % options.shards != options.shard or name in options.skip:
            continue
        print(json.dumps({"begins": name}), flush=True)
        faulthandler.dump_traceback_later(SECONDS_MAX, exit=True)
        began = time.monotonic()
        found = try_operator(op, dtype, options.samples)
        found["seconds"] = round(time.monotonic() - began, 3)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"name": name, **found}), flush=True)


def work(options: argparse.Namespace) -> Iterator[tuple[OpInfo, torch.dtype]]:
    """List the chosen operators with their chosen dtypes, or with one if none is chosen."""
    wanted = [getattr(torch, name) for name in options.dtypes]
    for op in op_db:
        if options.only and op.formatted_name not in options.only:
            continue
        declared = sorted(op.supported_dtypes("cpu"), key=str)
        chosen = [dtype for dtype in declared if dtype in wanted] if wanted else declared
        for dtype in chosen or declared[:1]:
            yield op, dtype


def try_operator(op: OpInfo, dtype: torch.dtype, samples_max: int) -> dict[str, Any]:
    """Try the samples of an operator; return counts and failures."""
    counts = {"passed": 0, "refused": 0, "failed": 0}
    refusals: dict[str, int] = {}
    failures: list[str] = []
    for title, ways in samples(op, dtype, samples_max):
        verdict = "passed"
        for attempt in ways:
            try:
                wrong = attempt()
            except Refused as refusal:
                verdict = "refused" if verdict == "passed" else verdict
                refusals[str(refusal)] = refusals.get(str(refusal), 0) + 1
                continue
            if wrong:
                verdict = "failed"
                failures += [f"{title}: {text}" for text in wrong]
        counts[verdict] += 1
    return {**counts, "refusals": refusals, "failures": failures}


def samples(
    op: OpInfo, dtype: torch.dtype, most: int
) -> Iterator[tuple[str, Iterable[Callable[[], list[str]]]]]:
    """Yield samples, the invalid ones last, each with the ways to try it."""
    differentiated = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiated)):
        if most and index >= most:
            break
        ways = attempts(op, sample, dtype)
        yield f"sample {index}", (partial(compare, op, way, attempt) for way, attempt in ways)
    if dtype == _error_dtype(op):
        for index, attempt in enumerate(wrong_samples(op)):
            yield f"error {index}", [attempt]


def _error_dtype(op: OpInfo) -> torch.dtype:
    """Return the dtype with which the invalid samples are tried, the same for all dtypes."""
    declared = op.supported_dtypes("cpu")
    return torch.float32 if torch.float32 in declared else min(declared, key=str)


if __name__ == "__main__":
    main()
