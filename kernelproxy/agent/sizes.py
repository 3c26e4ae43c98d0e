"""Numbers of bytes, for people. Pure."""

from __future__ import annotations


def size(count: int) -> str:
    """Say a number of bytes, such as ``1.5 GiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
