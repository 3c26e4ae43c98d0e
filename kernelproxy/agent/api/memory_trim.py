"""Memory that the daemon does not need any more."""

from __future__ import annotations

import ctypes
import gc


def give_back_memory() -> None:
    """Free what sessions that have closed were made of, and return free memory to the system.

    Their parts refer to each other, and a daemon that rests allocates too little to collect them by
    itself. What threads have freed, such as those that store checkpoints, stays with the C library
    until it is told to give it back. Takes some ten milliseconds.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
