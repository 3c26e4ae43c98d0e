"""NVIDIA GPUs, found by NVML: the agent never opens a CUDA context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from kernelproxy.devices.device import Device
from kernelproxy.errors import DeviceError
from kernelproxy.oplog import DeviceKind


def all_devices() -> list[Device]:
    """List the GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [_describe(nvml, index, handle) for index, handle in enumerate(_visible(nvml))]


def parse(text: str) -> Device:
    """Make a device from what follows ``cuda:`` in the configuration: its number.

    Raises
    ------
    DeviceError
        If it is no number, or no such GPU is visible.
    """
    if not text.isdigit():
        raise DeviceError(f"{text!r} is no number of a GPU (in cuda:{text}).")
    with _nvml() as nvml:
        handles = _visible(nvml) if nvml is not None else []
        if nvml is None or int(text) >= len(handles):
            seen = f"{len(handles)} visible" if handles else "none found"
            raise DeviceError(f"There is no GPU cuda:{text} on this machine ({seen}).")
        return _describe(nvml, int(text), handles[int(text)])


@contextmanager
def _nvml() -> Iterator[ModuleType | None]:
    """Give the NVML module, or None where there is no driver."""
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


def _visible(nvml: ModuleType) -> list[object]:
    """List handles in the order in which CUDA numbers them (workers use PCI bus order)."""
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
            break  # CUDA, too, ignores what follows the first name that it does not know
    return handles


def _describe(nvml: ModuleType, index: int, handle: object) -> Device:
    name = nvml.nvmlDeviceGetName(handle)
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Device(f"cuda:{index}", DeviceKind.CUDA, name, memory, 0, f"cuda:{index}")
