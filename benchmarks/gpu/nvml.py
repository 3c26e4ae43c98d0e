"""NVML's view of a GPU: the memory in use, and the processes that use it."""

from __future__ import annotations

from typing import Any


def view(index: int = 0) -> dict[str, Any]:
    """Return the bytes in use on a GPU, those that are free, and those of each process by pid.

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
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error
    taken = {each.pid: each.usedGpuMemory or 0 for each in processes}
    return {"used": int(memory.used), "free": int(memory.free), "processes": taken}
