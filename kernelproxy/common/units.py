"""Units of memory and time: their names, how they are read and how they are shown. Pure.

`labextension/src/text/format.ts` shows them in the same way; `labextension/src/testing/units.json`
has the cases that both are tested with. Units of memory are binary: a GiB has 2^30 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

MIB = 1 << 20
MINUTE, HOUR = 60.0, 3600.0

#: Units of memory in policies.
SIZE_UNITS: Mapping[str, int] = MappingProxyType({"MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40})
#: Units of time in policies.
DURATION_UNITS: Mapping[str, int] = MappingProxyType({"s": 1, "min": 60, "h": 3600, "d": 86400})

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """Read a size such as ``4GiB``, ``1.5 GB`` or ``1048576`` (bytes).

    Raises
    ------
    ValueError
        If it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size: write 4GiB, 512MiB or a number of bytes.")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** _POWERS[found[2].upper()])


def parse_duration(text: str) -> float:
    """Read a time such as ``90``, ``90s``, ``10m``, ``1.5 h``; return seconds.

    Raises
    ------
    ValueError
        If it is not a time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|m|min|h|d)?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time: write 90s, 10m or 2h.")
    return float(found[1]) * DURATION_UNITS[{None: "s", "m": "min"}.get(found[2], found[2])]


def bytes_text(count: float) -> str:
    """Format a number of bytes: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{_rounded(value):.0f} {unit}" if unit == "B" else f"{_tenths(value)} {unit}"
        value /= 1024
    return f"{_tenths(value)} GiB"


def mebibytes_text(count: float) -> str:
    """Format bytes in MiB, rounded up: what exceeds a limit is shown to exceed it."""
    return f"{math.ceil(count / MIB)} MiB"


def duration_text(seconds: float) -> str:
    """Format a duration: ``4 s``, ``3 min``, ``1.5 h``."""
    if seconds < 1.0:
        return "less than 1 s"
    if seconds < 90.0:
        return f"{_rounded(seconds)} s"
    if seconds < 5400.0:
        return f"{_rounded(seconds / MINUTE)} min"
    return f"{_tenths(seconds / HOUR).removesuffix('.0')} h"


def exact_duration_text(seconds: float) -> str:
    """Format a configured duration, without rounding: ``10 minutes``, ``2.5 seconds``."""
    for unit, length in (("hour", HOUR), ("minute", MINUTE)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}{'' if seconds == length else 's'}"
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"


def interval_text(seconds: float) -> str:
    """Format a configured duration in short, without rounding: ``10 min``, ``90 s``."""
    for unit, length in (("h", HOUR), ("min", MINUTE)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def measured_text(seconds: float) -> str:
    """Format a measured time: ``0.4 ms``, ``1.25 s``, ``3.0 min``."""
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 120.0 else f"{seconds / MINUTE:.1f} min"


def seconds_text(seconds: float) -> str:
    """Format a time of a table whose rows are compared: ``0.35 s``, ``12 s``, ``1,538 s``."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def percent_text(part: float) -> str:
    """Format a part of a whole, which may be a little more by rounding: ``63 %``."""
    return f"{_rounded(100 * min(part, 1.0))} %"


def _rounded(value: float) -> int:
    """Round halves up, as browsers do."""
    return math.floor(value + 0.5)


def _tenths(value: float) -> str:
    return f"{_rounded(10 * value) / 10:.1f}"
