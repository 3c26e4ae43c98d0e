"""Register of host memory seen so far, with its owners.

Arrays and tensors are windows into memory with an owner. Sharing is preserved by saving each piece
of memory once, with its owner, and every window as (owner, offset, geometry). NumPy and torch may
use the same memory (``from_numpy``, ``.numpy()``), so there is one register for both, by address.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

from kernelproxy.kernel.namespace.types import Unsaveable


class Memory:
    """Pieces of memory by address, each with the object that represents it in the stream.

    Owners are kept alive, so that their addresses cannot be reused meanwhile.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, Any]] = []  # end, owner; beside `_starts`

    def find(self, address: int, nbytes: int) -> tuple[Any, int] | None:
        """Return a range's owner and the range's offset in its memory, or None if the range is new.

        Raises
        ------
        Refused
            If a known piece contains only a part of it.
        """
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._pieces[at][0]:
            end, owner = self._pieces[at]
            if address + nbytes <= end:
                return owner, address - self._starts[at]
            raise Unsaveable("memory that overlaps with another array's or tensor's")
        if at + 1 < len(self._starts) and self._starts[at + 1] < address + nbytes:
            raise Unsaveable("memory that overlaps with another array's or tensor's")
        return None

    def add(self, address: int, nbytes: int, owner: Any) -> None:
        """Register an owner; `find` must have returned None for the range."""
        at = bisect.bisect_right(self._starts, address)
        self._starts.insert(at, address)
        self._pieces.insert(at, (address + nbytes, owner))


def at_address(address: int, nbytes: int, owner: Any) -> Any:
    """Return memory as an object with the buffer protocol; `owner` lives as long as that object.

    It is no memoryview: a memoryview of a memoryview crashes Python's garbage collector (seen in
    3.11.7).
    """
    window = (ctypes.c_ubyte * nbytes).from_address(address)
    window.owner = owner  # type: ignore[attr-defined]
    return window


def fill(address: int, nbytes: int, content: Any) -> None:
    """Copy content to an address."""
    if nbytes:
        window = (ctypes.c_ubyte * nbytes).from_address(address)
        memoryview(window).cast("B")[:] = memoryview(content).cast("B")
