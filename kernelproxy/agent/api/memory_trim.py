"""Release of memory that the daemon does not need any more."""

from __future__ import annotations

import ctypes
import gc


def give_back_memory() -> None:
    """Collect the objects of closed sessions, and return free memory to the system.

    These objects refer to each other, and an idle daemon allocates too little to start Python's
    garbage collector. Memory that threads have freed, such as those that store checkpoints, stays
    with the C library until `malloc_trim` is called. Takes about ten milliseconds.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
