"""Parser of user-facing memory sizes."""

from __future__ import annotations

import re

from kernelproxy.common.errors import DeviceError

_UNITS = {"": 1, "B": 1, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_bytes(text: str) -> int:
    """Read a size such as ``4GiB``, ``1.5 GB`` or ``1048576`` (bytes).

    Raises
    ------
    DeviceError
        If it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise DeviceError(f"{text!r} is not a size: write 4GiB, 512MiB or a number of bytes.")
    power = _UNITS[found[2].upper()]
    unit = 1 if power == 1 else (1 << power if found[3] else 1000 ** (power // 10))
    return int(float(found[1]) * unit)
