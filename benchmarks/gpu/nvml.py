"""NVML's view of a GPU: the memory in use, and the processes that use it."""

from __future__ import annotations

from typing import Any


def view(index: int = 0) -> dict[str, Any]:
    """Return the bytes in use on a GPU, and those of each process by pid.

    In a container NVML may report the pids of the host, or none.

    Raises
    ------
    RuntimeError
        If NVML does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error
    return {"used": used, "processes": {each.pid: each.usedGpuMemory or 0 for each in processes}}
