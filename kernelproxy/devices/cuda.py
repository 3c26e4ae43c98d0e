"""NVIDIA GPUs, found by NVML: the agent never opens a CUDA context.

A GPU, or a part of one by MIG, is identified by its UUID. A worker sees only the one that it uses:
its ``CUDA_VISIBLE_DEVICES`` is that UUID, so that torch's ``cuda:0`` is always the right one, and
no library makes a context on another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.options import DEVICES
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices.device import Device, memory_size

#: Part of a GPU's memory that sessions may not use: every worker has a CUDA context and library
#: workspaces there, which are not charged to any storage. 1/`RESERVED_PART` of the memory, but at
#: least `RESERVED_BYTES_MIN`.
RESERVED_PART, RESERVED_BYTES_MIN = 32, 1 << 30

#: Cores per multiprocessor by compute capability, where it is not 128; NVML reports only cores.
_CORES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
#: Values of ``CUDA_VISIBLE_DEVICES`` that hide all GPUs on purpose; the last three are NVIDIA's
#: container toolkit's.
_HIDDEN = ("", "-1", "none", "void", "NoDevFiles")
#: NVML's compute modes in which several workers cannot use a GPU.
_COMPUTE_MODES = {1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_INSTEAD = f" To use software devices instead: {DEVICES.variable}=cpu:4GiB."


@dataclass(frozen=True)
class _Gpu:
    """A GPU, or a part of one, as NVML finds it.

    Parameters
    ----------
    handle, whole : object
        NVML's handle of it; and that of the whole GPU, if this is a part.
    uuid, whole_uuid : str
        UUIDs of it; and of the whole GPU, if this is a part.
    """

    handle: Any
    uuid: str
    whole: Any = None
    whole_uuid: str = ""


def all_devices() -> list[Device]:
    """List the GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` leaves visible.

    Raises
    ------
    DeviceError
        If there is a GPU, but it cannot be used. So a machine with GPUs never computes on software
        devices without notice.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None and names.strip() in _HIDDEN:
        return []
    with _nvml() as (nvml, why):
        if nvml is None:
            if _has_gpu_file():
                raise DeviceError(f"This machine has a GPU, but {why}.{_INSTEAD}")
            return []
        found = [_describe(nvml, index, gpu) for index, gpu in enumerate(_visible(nvml))]
        if not found and names is not None:
            raise DeviceError(f"CUDA_VISIBLE_DEVICES={names} names no GPU of this machine.")
        if not found and nvml.nvmlDeviceGetCount():
            why = "its MIG mode is on and it has no instance: see nvidia-smi mig -cgi"
            raise DeviceError(f"This machine has a GPU, but {why}.{_INSTEAD}")
        return found


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
    with _nvml() as (nvml, why):
        gpus = _visible(nvml) if nvml is not None else []
        if nvml is None or int(number) >= len(gpus):
            seen = f"{len(gpus)} visible" if nvml is not None else why
            raise DeviceError(f"There is no GPU cuda:{number} on this machine ({seen}).")
        found = _describe(nvml, int(number), gpus[int(number)])
    if not separator:
        return found
    memory = memory_size(size)
    if not 1 << 20 <= memory <= found.memory_total:
        total = found.memory_total >> 20
        raise DeviceError(f"cuda:{text} is not between 1 MiB and the {total} MiB that it may have.")
    return replace(found, memory_total=memory)


def faults(uuids: Iterable[str]) -> dict[str, str]:
    """Return what NVML reports of GPUs that must not be used, by UUID: clauses.

    Raises
    ------
    DeviceError
        If it does not answer.
    """
    found = {}
    with _nvml() as (nvml, why):
        if nvml is None:
            raise DeviceError(f"NVML cannot be asked: {why}.")
        for uuid in uuids:
            if fault := _fault(nvml, uuid):
                found[uuid] = fault
    return found


def _fault(nvml: ModuleType, uuid: str) -> str:
    gone = {
        nvml.NVML_ERROR_GPU_IS_LOST: "the driver has lost it",
        nvml.NVML_ERROR_NOT_FOUND: "the driver does not find it any more",
        nvml.NVML_ERROR_RESET_REQUIRED: "it has to be reset (nvidia-smi --gpu-reset)",
    }
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        with suppress(nvml.NVMLError):  # a whole GPU
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        nvml.nvmlDeviceGetMemoryInfo(handle)  # which a GPU that is lost does not answer
    except nvml.NVMLError as error:
        return gone.get(error.value, "")
    with suppress(nvml.NVMLError, AttributeError):  # an old GPU or package
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if failed:
            return "its memory has errors that cannot be repaired"
        if pending:
            return "its memory has errors that a reset repairs (nvidia-smi --gpu-reset)"
    with suppress(nvml.NVMLError, AttributeError):
        if nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle):
            return "its memory has errors that a reset repairs (nvidia-smi --gpu-reset)"
    return ""


@contextmanager
def _nvml() -> Iterator[tuple[ModuleType | None, str]]:
    """Yield the initialised NVML module; or None, and why there is none.

    Raises
    ------
    DeviceError
        If NVML fails for a GPU, such as one that has fallen off the bus.
    """
    try:
        import pynvml
    except ImportError:
        yield None, "the package nvidia-ml-py, which finds GPUs, is not installed"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield None, f"NVIDIA's driver does not answer: {error}" if _has_gpu_file() else "none found"
        return
    try:
        yield pynvml, ""
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVIDIA's driver cannot describe a GPU: {error}.{_INSTEAD}") from error
    finally:
        pynvml.nvmlShutdown()


def _has_gpu_file() -> bool:
    """True if a GPU can be opened here: the files of containers without one are left out."""
    return any(each.name[len("nvidia") :].isdigit() for each in Path("/dev").glob("nvidia[0-9]*"))


def _visible(nvml: ModuleType) -> list[_Gpu]:
    """List GPUs in the order of CUDA's numbering (workers use PCI bus order).

    Names are those of ``CUDA_VISIBLE_DEVICES``: numbers, and UUIDs or unique beginnings of them. Of
    a GPU in MIG mode, all parts are visible, and its name means the first part.
    """
    parts = [_parts(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    if configured is None:
        return [each for gpu in parts for each in gpu]
    found: list[_Gpu] = []
    for name in (each.strip() for each in configured.split(",")):
        gpu = _named(name, parts)
        if gpu is None or gpu in found:
            break  # like CUDA, ignore all names after the first unknown one
        found.append(gpu)
    return found


def _parts(nvml: ModuleType, index: int) -> list[_Gpu]:
    """Return a GPU; in MIG mode, its instances."""
    whole = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(whole)
    except nvml.NVMLError:  # a GPU without MIG
        mode = 0
    uuid = _text(nvml.nvmlDeviceGetUUID(whole))
    if not mode:
        return [_Gpu(whole, uuid)]
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
        with suppress(nvml.NVMLError):  # there are fewer
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
            found.append(_Gpu(part, _text(nvml.nvmlDeviceGetUUID(part)), whole, uuid))
    return found


def _named(name: str, parts: list[list[_Gpu]]) -> _Gpu | None:
    """Return the GPU that a name in ``CUDA_VISIBLE_DEVICES`` means; None if there is none."""
    if name.isdigit():
        return next(iter(parts[int(name)]), None) if int(name) < len(parts) else None
    if not name:
        return None
    matching = [each for gpu in parts for each in gpu if each.uuid.startswith(name)]
    matching += [gpu[0] for gpu in parts if gpu and gpu[0].whole_uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _describe(nvml: ModuleType, index: int, gpu: _Gpu) -> Device:
    whole = gpu.handle if gpu.whole is None else gpu.whole
    try:
        mode = _COMPUTE_MODES.get(nvml.nvmlDeviceGetComputeMode(whole))
    except nvml.NVMLError:  # not reported for this GPU
        mode = None
    if mode is not None:
        raise DeviceError(
            f"GPU cuda:{index} is in compute mode {mode}, in which several sessions cannot use it."
            " An administrator can change that: nvidia-smi --compute-mode=DEFAULT."
        )
    total = int(nvml.nvmlDeviceGetMemoryInfo(gpu.handle).total)
    memory = total - min(total // 2, max(RESERVED_BYTES_MIN, total // RESERVED_PART))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Device(
        f"cuda:{index}",
        DeviceKind.CUDA,
        _text(nvml.nvmlDeviceGetName(gpu.handle)),
        memory,
        0,
        "cuda:0",
        capability=100 * major + minor,
        processors=_processors(nvml, gpu, (major, minor)),
        node=_node(nvml, gpu),
        visible=gpu.uuid,
        memory_physical=total,
    )


def _processors(nvml: ModuleType, gpu: _Gpu, capability: tuple[int, int]) -> int:
    """Return the number of multiprocessors; 0 if it is not reported."""
    try:
        if gpu.whole is not None:
            return int(nvml.nvmlDeviceGetAttributes(gpu.handle).multiprocessorCount)
        return int(nvml.nvmlDeviceGetNumGpuCores(gpu.handle)) // _CORES.get(capability, 128)
    except nvml.NVMLError:  # an old GPU or driver
        return 0


def _node(nvml: ModuleType, gpu: _Gpu) -> str:
    """Return the path of a GPU's device file; "" if the driver does not report it.

    A MIG instance (part of a GPU) has no file of its own, and daemons may share a GPU by MIG
    instances.
    """
    if gpu.whole is not None:
        return ""
    try:
        return f"/dev/nvidia{nvml.nvmlDeviceGetMinorNumber(gpu.handle)}"
    except nvml.NVMLError:
        return ""


def _text(found: str | bytes) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found
