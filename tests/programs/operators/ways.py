"""Report how each aten operator with a CUDA kernel is executed; run under a device session.

Prints one JSON object for each: its name, its ``way`` (``kernel``: ours, ``composite``: made of
others, ``fallback``: sent by default), and whether a software device ``executes`` it. Then one for
each of a few that it does not: its name and the error that a call raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchgen
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

NATIVE = Path(__file__).resolve().parents[3] / "native"
YAML = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"


def cuda_operators() -> Iterator[str]:
    """List the operators for which torch has a CUDA kernel, whether or not this build has it."""
    parsed = parse_native_yaml(str(YAML / "native_functions.yaml"), str(YAML / "tags.yaml"))
    kernels = parsed.backend_indices[DispatchKey.CUDA]
    by_name = {str(function.func.name): function for function in parsed.native_functions}
    for name, function in by_name.items():
        delegate = by_name.get(str(function.structured_delegate), function)
        if kernels.has_kernel(delegate):
            yield f"aten::{name}"


def way_of(name: str) -> str:
    """Return how the dispatcher treats a CUDA operand in this process."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
        return "kernel"
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in composite):
        return "composite"
    return "fallback"


def rows_with(*columns: str) -> set[str]:
    """List the operators whose row in the native table of operators has one of these entries."""
    text = (NATIVE / "ops/table.h").read_text("utf-8")
    rows = re.findall(r'\{\.name = "(aten::[\w.]+)",(.*?)\},\s', text, re.DOTALL)
    return {name for name, row in rows if any(column in row for column in columns)}


def refusals() -> dict[str, Callable[[torch.Tensor], object]]:
    """Calls of operators that exist on NVIDIA GPUs only."""
    aten = torch.ops.aten
    return {
        "cudnn_convolution": lambda x: aten.cudnn_convolution(
            x, x, [0, 0], [1, 1], [1, 1], 1, False, False, False
        ),
        "_masked_scale": lambda x: aten._masked_scale(x, x, 2.0),
        "batch_norm_stats": lambda x: aten.batch_norm_stats(x, 1e-5),
        "_fused_dropout": lambda x: aten._fused_dropout(x, 0.5),
    }


def main() -> None:
    ours = rows_with(".substitute", "Way::no", ".way = Way::client")
    known = set(torch._C._dispatch_get_all_op_names())
    for name in cuda_operators():
        if name not in known:
            continue
        way = way_of(name)
        on_cpu = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        executes = on_cpu or way == "composite" or name in ours
        print(json.dumps({"name": name, "way": way, "executes": executes}))
    x = torch.ones(1, 1, 1, 1, device="cuda")
    for name, call in refusals().items():
        try:
            call(x)
            error = "nothing"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"name": name, "error": error}))


if __name__ == "__main__":
    main()
