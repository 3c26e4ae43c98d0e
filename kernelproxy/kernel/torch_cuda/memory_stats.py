"""``torch.cuda`` memory statistics from the client's own accounting.

The names are those of the CUDA caching allocator. Memory is charged when a storage is made and
returned when it is freed. There is no cache, so *active* equals *allocated*, and *reserved* is what
the agent has granted to the session.
"""

from __future__ import annotations

from typing import Any

from kernelproxy.kernel.activation.native_client import NativeClient

# Counters of the client.
_COUNTS = ("allocations", "frees", "bytes_allocated", "bytes_freed", "out_of_memory")


def _stat(current: int = 0, peak: int = 0, allocated: int = 0, freed: int = 0) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}


def _pools(whole: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return a statistic for all pools; everything counts as large, as there is only one pool."""
    return {"all": whole, "small_pool": _stat(), "large_pool": dict(whole)}


class MemoryStatistics:
    """Implementation of ``torch._C._cuda_memoryStats`` and related functions."""

    def __init__(self, client: NativeClient) -> None:
        self._client = client
        self._reserved_peak = 0
        self._fraction = 1.0
        self._counted_from: dict[str, int] = {}  # counters at the last reset

    def stats(self, device: int) -> dict[str, Any]:
        """Return all statistics; called by ``torch.cuda.memory_stats``, which flattens them."""
        found = self._client.memory()
        used, peak, granted = found["used"], found["peak"], found["granted"]
        self._reserved_peak = max(self._reserved_peak, granted)
        since = {name: found[name] - self._counted_from.get(name, 0) for name in _COUNTS}
        in_bytes = _stat(used, peak, since["bytes_allocated"], since["bytes_freed"])
        live = found["allocations"] - found["frees"]
        count = _stat(live, found["live_peak"], since["allocations"], since["frees"])
        return {
            "allocation": _pools(count),
            "active": _pools(count),
            "segment": _pools(_stat(1, 1, 1, 0)),
            "inactive_split": _pools(_stat()),
            "allocated_bytes": _pools(in_bytes),
            "active_bytes": _pools(in_bytes),
            "requested_bytes": _pools(in_bytes),
            "reserved_bytes": _pools(_stat(granted, self._reserved_peak, granted, 0)),
            "inactive_split_bytes": _pools(_stat()),
            "oversize_allocations": _stat(),
            "oversize_segments": _stat(),
            "num_alloc_retries": 0,
            "num_ooms": since["out_of_memory"],
            "num_sync_all_streams": 0,
            "num_device_alloc": since["allocations"],
            "num_device_free": since["frees"],
            "max_split_size": -1,
        }

    def reset_peak(self, device: int) -> None:
        """Called by ``torch.cuda.reset_peak_memory_stats``."""
        self._client.reset_peak()
        self._reserved_peak = self._client.memory()["granted"]

    def reset_accumulated(self, device: int) -> None:
        """Called by ``torch.cuda.reset_accumulated_memory_stats``."""
        self._counted_from = self._client.memory()

    def set_fraction(self, fraction: float, device: int) -> None:
        """Called by ``torch.cuda.set_per_process_memory_fraction``."""
        self._client.limit_memory(int(fraction * self._client.memory()["total"]))
        self._fraction = fraction

    def fraction(self, device: int) -> float:
        """Called by ``torch.cuda.get_per_process_memory_fraction``."""
        return self._fraction

    def accelerator_stats(self, device: int) -> dict[str, Any]:
        """Called by ``torch.accelerator.memory_stats``, whose names differ slightly."""
        found = self.stats(device)
        found["allocated"] = found.pop("allocation")
        return found

    def mem_get_info(self, device: int) -> tuple[int, int]:
        """Return free and total bytes of the device, as ``cudaMemGetInfo``.

        Memory that is granted to the session and unused counts as free: there is no cache to empty.
        """
        found = self._client.memory()
        free = found["free"] + found["granted"] - found["used"]
        # A quota may have been lowered below the granted memory.
        return min(free, max(0, found["total"] - found["used"])), found["total"]
