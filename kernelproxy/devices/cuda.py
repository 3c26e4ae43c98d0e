"""NVIDIA GPUs, found by NVML: the agent never opens a CUDA context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices.device import Device, memory_size

#: Part of a GPU's memory that sessions may not use: every worker has a CUDA context and library
#: workspaces there, which are not charged to any storage. 1/`RESERVED_PART` of the memory, but at
#: least `RESERVED_BYTES_MIN`.
RESERVED_PART, RESERVED_BYTES_MIN = 32, 1 << 30

#: Cores per multiprocessor by compute capability, where it is not 128; NVML reports only cores.
_CORES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


def all_devices() -> list[Device]:
    """List the GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [_describe(nvml, index, handle) for index, handle in enumerate(_visible(nvml))]


def parse(text: str) -> Device:
    """Parse the part after ``cuda:`` in the configuration: the GPU's number, and optionally how
    much of its memory sessions may use, as in ``0:20GiB``.

    Raises
    ------
    DeviceError
        If it is not a number, the GPU is not visible, or it has less memory.
    """
    number, separator, size = text.partition(":")
    if not number.isdigit():
        raise DeviceError(f"{number!r} is not the number of a GPU (in cuda:{text}).")
    with _nvml() as nvml:
        handles = _visible(nvml) if nvml is not None else []
        if nvml is None or int(number) >= len(handles):
            seen = f"{len(handles)} visible" if handles else "none found"
            if nvml is None and not _is_installed():
                seen = "the package nvidia-ml-py, which finds them, is not installed"
            raise DeviceError(f"There is no GPU cuda:{number} on this machine ({seen}).")
        found = _describe(nvml, int(number), handles[int(number)])
    if not separator:
        return found
    memory = memory_size(size)
    if not 1 << 20 <= memory <= found.memory_total:
        total = found.memory_total >> 20
        raise DeviceError(f"cuda:{text} is not between 1 MiB and the {total} MiB that it may have.")
    return replace(found, memory_total=memory)


@contextmanager
def _nvml() -> Iterator[ModuleType | None]:
    """Yield the initialised NVML module; None if the module or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _is_installed() -> bool:
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return False
    return True


def _visible(nvml: ModuleType) -> list[object]:
    """List GPU handles in the order of CUDA's numbering (workers use PCI bus order)."""
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    if configured is None:
        count = nvml.nvmlDeviceGetCount()
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles: list[object] = []
    for name in (each.strip() for each in configured.split(",")):
        try:
            if name.isdigit():
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError:
            break  # like CUDA, ignore all names after the first unknown one
    return handles


def _describe(nvml: ModuleType, index: int, handle: object) -> Device:
    name = nvml.nvmlDeviceGetName(handle)
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    memory = total - min(total // 2, max(RESERVED_BYTES_MIN, total // RESERVED_PART))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        cores = nvml.nvmlDeviceGetNumGpuCores(handle)
    except nvml.NVMLError:  # an old GPU or driver does not report it
        cores = 0
    return Device(
        f"cuda:{index}",
        DeviceKind.CUDA,
        name,
        memory,
        0,
        f"cuda:{index}",
        capability=100 * major + minor,
        processors=cores // _CORES.get((major, minor), 128),
        node=_node(nvml, handle),
    )


def _node(nvml: ModuleType, handle: object) -> str:
    """Return the path of a GPU's device file; "" if the driver does not report it.

    A MIG instance (part of a GPU) has no file of its own, and daemons may share a GPU by MIG
    instances.
    """
    try:
        return f"/dev/nvidia{nvml.nvmlDeviceGetMinorNumber(handle)}"
    except nvml.NVMLError:
        return ""
