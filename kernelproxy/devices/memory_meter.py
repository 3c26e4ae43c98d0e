"""The memory of a device as its driver reports it, in all and by process.

A GPU's memory is used by more than storages: each worker has a CUDA context, libraries and cached
blocks there, and processes that are no workers use it too. Only the driver knows how much. A
software device has no meter: it charges nothing but storages.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from kernelproxy.devices.device import Device


@dataclass(frozen=True)
class MemorySample:
    """Memory of a device at one moment, as its driver reports it.

    Parameters
    ----------
    total, used : int
        Bytes.
    processes : mapping of int to int or None
        Bytes by process id; None where the driver does not report them. The driver of a machine
        gives the ids that processes have outside of containers, or leaves them out.
    """

    total: int
    used: int
    processes: Mapping[int, int | None] = field(default_factory=dict)


class MemoryMeter(Protocol):
    """Measures the memory of one device."""

    def measure(self) -> MemorySample | None:
        """Return what the driver reports now; None if it does not answer. This may block."""


def memory_meter(device: Device) -> MemoryMeter | None:
    """Return the meter of a device; None for a software device."""
    return NvmlMeter(device.visible) if device.visible else None


class NvmlMeter:
    """Measures the memory of a GPU, or of a part of one by MIG, by NVML.

    Parameters
    ----------
    uuid : str
        Its UUID.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._lock = threading.Lock()
        self._opened: tuple[ModuleType, Any] | None = None

    def measure(self) -> MemorySample | None:
        """See `MemoryMeter`."""
        with self._lock:
            try:
                import pynvml

                nvml, handle = self._opened or self._open(pynvml)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                processes = _processes(nvml, handle)
            except ImportError:
                return None
            except pynvml.NVMLError:
                self._close()  # after an update of the driver, only a new start succeeds
                return None
        return MemorySample(int(memory.total), int(memory.used), processes)

    def _open(self, nvml: ModuleType) -> tuple[ModuleType, Any]:
        nvml.nvmlInit()
        try:
            self._opened = nvml, nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            raise
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            nvml, self._opened = self._opened[0], None
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _processes(nvml: ModuleType, handle: Any) -> dict[int, int | None]:
    """Return the memory of processes that compute or draw; one that does both is in both lists."""
    found: dict[int, int | None] = {}
    for each in _listed(nvml.nvmlDeviceGetComputeRunningProcesses, handle, nvml):
        found[int(each.pid)] = each.usedGpuMemory
    for each in _listed(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle, nvml):
        found.setdefault(int(each.pid), each.usedGpuMemory)
    return found


def _listed(list_processes: Any, handle: Any, nvml: ModuleType) -> list[Any]:
    try:
        return list(list_processes(handle))
    except nvml.NVMLError:  # not reported for this GPU, or to this user
        return []
