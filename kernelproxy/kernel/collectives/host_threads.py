"""Compute threads on the host while a collective is executed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

# That of torch's OpenMP, which sets the number of the calling thread only; torch's own function
# also changes that of threads that begin later.
_set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """In this context, this thread executes torch's operators on the host alone.

    The ranks of a host share its cores, and OpenMP's helper threads spin for milliseconds after
    each operator: a sum of a megabyte would take longer with them. Its result is the same: these
    operators compute each element for itself.
    """
    threads = torch.get_num_threads()  # torch sets a thread's number at the first query
    if threads == 1 or _set_threads is None:
        yield
        return
    _set_threads(1)
    try:
        yield
    finally:
        _set_threads(threads)
