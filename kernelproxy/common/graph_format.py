"""Serialization of a graph's description as bytes.

A description is a JSON object, compressed by zlib:

    version    FORMAT
    symbols    [[name, hint, least or null, most or null, positive], …]
    inputs     [input, …]: {"number": size} or {"tensor": geometry, "changed": true or false}
    constants  [{"dtype", "size", "bytes"}, …]: on the host
    nodes      [[target, arguments, keywords], …]
    outputs    [value, …]: tensors
    options    {"is_inference", "is_backward", "settings"}

A geometry is ``{"dtype", "place", "size", "stride"}``. The place is "device", "host" (the tensor
arrives on the device and must be moved to the host), or "number" (it arrives on the host). Sizes
are integers, names of symbols, or ``[function, size, …]``. Values that JSON cannot express are
objects with one key: node, float, complex, tuple, slice, dtype, device, layout, or format. A node's
number counts inputs, constants and nodes, in this order.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

FORMAT = 1
#: Limit of an uncompressed description; no real program needs more.
BYTES_MAX = 256 << 20

#: Possible places of an input tensor.
PLACES = ("device", "host", "number")
#: Functions in sizes, of sympy and of `torch.utils._sympy.functions`.
SIZE_FUNCTIONS = (
    "Add", "Mul", "Pow", "PowByNatural", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv",
    "CeilDiv", "ModularIndexing",
)  # fmt: skip
#: Functions that calculate with sizes, by module.
ARITHMETIC = {
    "operator": (
        "getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow", "eq", "ne",
        "lt", "le", "gt", "ge", "and_", "or_",
    ),
    "math": ("ceil", "floor", "trunc"),
    "torch": (
        "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum", "_sym_sqrt",
    ),
}  # fmt: skip
#: Operator libraries that every torch has.
LIBRARIES = ("aten", "prims")
#: Settings of inductor that change results or their calculation, but cannot make it execute other
#: code.
SETTINGS = (
    "emulate_precision_casts", "epilogue_fusion", "fallback_random", "permute_fusion",
    "shape_padding", "split_reductions",
)  # fmt: skip


class UnsupportedGraphError(Exception):
    """Raised for a graph that cannot be shipped; the text is the reason, as a clause."""


class DescriptionError(Exception):
    """Raised for bytes that are not a description of a graph."""


@cache
def arithmetic() -> dict[str, Callable[..., Any]]:
    """Return the functions that calculate with sizes and that this torch has."""
    return {
        f"{module}.{name}": getattr(import_module(module), name)
        for module, names in ARITHMETIC.items()
        for name in names
        if hasattr(import_module(module), name)
    }


def pack(description: dict[str, Any]) -> bytes:
    """Serialize a description."""
    text = json.dumps(description, separators=(",", ":"), allow_nan=False)
    if len(text) > BYTES_MAX:
        raise UnsupportedGraphError("it is too large")
    return zlib.compress(text.encode(), 6)


def unpack(data: bytes) -> dict[str, Any]:
    """Deserialize a description; the caller checks its content.

    Raises
    ------
    DescriptionError
        If the bytes are not a valid description.
    """
    try:
        decompress = zlib.decompressobj()
        text = decompress.decompress(data, BYTES_MAX)
        if not decompress.eof:
            raise DescriptionError("the description of a graph is too long, or cut off")
        found = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise DescriptionError(f"the description of a graph is unreadable: {error}") from error
    if not isinstance(found, dict) or found.get("version") != FORMAT:
        raise DescriptionError("the description of a graph has another format")
    return found


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal, as their name."""
    return hashlib.sha256(data).hexdigest()
