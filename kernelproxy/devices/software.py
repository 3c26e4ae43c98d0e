"""Software devices: CPU threads with a declared memory size.

They use the same code path as GPUs, so that everything runs and can be tested without a GPU.
"""

from __future__ import annotations

import os

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices.device import Device, memory_size

DEFAULT_COUNT = 2
DEFAULT_BYTES = 2 << 30


def default_threads() -> int:
    """Return a software device's compute threads: ``OMP_NUM_THREADS``, else all usable cores."""
    configured = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if configured.isdigit() and int(configured) > 0:
        return int(configured)
    return len(os.sched_getaffinity(0))


def default_devices() -> list[Device]:
    """Return the default devices of a machine without GPUs."""
    return [_make(index, DEFAULT_BYTES, default_threads()) for index in range(DEFAULT_COUNT)]


def parse(text: str, index: int) -> Device:
    """Parse the part after ``cpu:`` in the configuration, such as ``4GiB@2``.

    Raises
    ------
    DeviceError
        If it is not a size, or the number of threads is not at least 1.
    """
    size, separator, threads = text.partition("@")
    if separator and not (threads.isdigit() and int(threads) > 0):
        raise DeviceError(f"{threads!r} is not a number of compute threads (in cpu:{text}).")
    memory = memory_size(size)
    if memory < 1 << 20:
        raise DeviceError(f"cpu:{text} has less than 1 MiB of memory.")
    return _make(index, memory, int(threads) if separator else default_threads())


def _make(index: int, memory: int, threads: int) -> Device:
    plural = "" if threads == 1 else "s"
    name = f"Software device ({threads} CPU thread{plural})"
    return Device(f"cpu:{index}", DeviceKind.SOFTWARE, name, memory, threads, "cpu")
