"""Names of ``torch._C`` that ``torch.cuda`` needs and builds without CUDA lack.

They are set when the extension module has executed and nothing has used it yet, so ``torch.cuda``
captures ours wherever it captures any. Builds with CUDA have these names, bound to the driver: they
are replaced, because this process must never open a context on a GPU.

Names that cannot work behind a proxy are set, too, and refuse with a text: a missing attribute
would not tell the user why.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kernelproxy.kernel.activation.native_client import NativeClient
from kernelproxy.kernel.torch_cuda import cuda_graphs
from kernelproxy.kernel.torch_cuda.memory_stats import MemoryStatistics
from kernelproxy.kernel.torch_cuda.streams import CUDA, event_base, refuse, stream_base
from kernelproxy.kernel.torch_cuda.torch_settings import setters

_TUNING = (
    "enable",
    "tuning_enable",
    "set_max_tuning_duration",
    "get_max_tuning_duration",
    "set_max_tuning_iterations",
    "get_max_tuning_iterations",
    "set_filename",
    "get_filename",
    "get_results",
    "get_validators",
    "read_file",
    "write_file",
    "write_file_on_exit",
    "set_rotating_buffer_size",
    "get_rotating_buffer_size",
    "set_numerical_check_tolerances",
)
# Names that refuse, by the reason.
_REFUSALS = {
    "it would hand out addresses of device memory, which lies in another process": (
        "_cuda_cudaCachingAllocator_raw_alloc",
        "_cuda_cudaCachingAllocator_raw_delete",
        "_cuda_cudaHostAllocator",
        "_cuda_customAllocator",
        "_cuda_changeCurrentAllocator",
        "_cuda_getAllocator",
        "_cuda_getCurrentBlasHandle",
        "_cuda_getCurrentSolverHandle",
        "_cuda_getStreamFromExternal",
        "_construct_CUDA_Tensor_From_Storage_And_Metadata",
    ),
    "graphs of one process cannot keep the memory of another": (
        "_cuda_checkPoolLiveAllocations",
        "_cuda_getCheckpointState",
        "_cuda_setCheckpointPoolState",
    ),
    "allocations are not recorded one by one": (
        "_cuda_attach_out_of_memory_observer",
        "_cuda_memorySnapshot",
        "_cuda_record_memory_history",
        "_cuda_record_memory_history_legacy",
        "_cuda_allocationTraceback",
        "_cuda_getMemoryMetadata",
        "_cuda_setMemoryMetadata",
    ),
    "CUDA source cannot be compiled for this device": (
        "_cuda_jiterator_compile_and_launch_kernel",
        "_cuda_sleep",
    ),
    "the device's libraries are not in this process": (
        "_cuda_getCublasWorkspaceSize",
        "_cuda_setCublasWorkspaceSize",
        "_cuda_getCublasLtWorkspaceSize",
        "_cuda_setCublasLtWorkspaceSize",
        "_cuda_record_untuned_enable",
        *(f"_cuda_tunableop_{name}" for name in _TUNING),
    ),
    "device memory lies in another process": tuple(
        f"_gds_{name}_{what}"
        for what, names in (
            ("buffer", ("register", "deregister")),
            ("handle", ("register", "deregister")),
            ("storage", ("load", "save")),
        )
        for name in names
    ),
}
# Names that builds with CUDA have and that are removed: with them torch assumes NCCL or cuDNN.
_REMOVED = ("_nccl_", "_cudnn")
# Prefixes of the other names of builds with CUDA: they would open the GPU in this process.
_OF_CUDA = (
    "_cuda_",
    "_gds_",
    "_can_use_",
    "_MemPool",
    "_CUDAPluggableAllocator",
    "_CUDAGreenContext",
)
_ATTENTION = (
    "_can_use_flash_attention",
    "_can_use_mem_efficient_attention",
    "_can_use_cudnn_attention",
)
_HARMLESS = frozenset({
    "_cuda_CUDAAllocator",  # a type of which nothing makes an object
    "_cuda_getHipblasltVersion",
    "_cuda_get_cudnn_benchmark_limit",
    "_cuda_set_cudnn_benchmark_limit",
    "_cuda_lock_mutex",
    "_cuda_unlock_mutex",
})  # fmt: skip
_HOST_STATISTICS = ("allocation", "segment", "allocated_bytes", "reserved_bytes")

_module: ModuleType | None = None
_before: dict[str, Any] = {}
_ABSENT = object()


class DeviceProperties:
    """``torch.cuda.get_device_properties``: the properties that a client knows of its device.

    Software devices claim compute capability 8.0, the oldest one with bfloat16.
    """

    is_integrated = 0
    is_multi_gpu_board = 0
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = 32
    regs_per_multiprocessor = 65536
    L2_cache_size = 0
    gcnArchName = ""  # noqa: N815
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 49152
    shared_memory_per_multiprocessor = 102400
    clock_rate = 0
    memory_clock_rate = 0
    memory_bus_width = 0
    pci_bus_id = 0
    pci_device_id = 0
    pci_domain_id = 0
    uuid = "00000000-0000-0000-0000-000000000000"

    def __init__(self, device: dict[str, Any]) -> None:
        self.name = str(device["name"])
        self.total_memory = int(device["total"])
        self.major, self.minor = divmod(int(device.get("capability", 0)) or 800, 100)
        processors = device.get("processors", 0) or device.get("threads", 0)
        self.multi_processor_count = max(1, int(processors))

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )


class _Generators(tuple[Any]):
    """``torch.cuda.default_generators``: a session has one, under every label."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


def install(c: ModuleType, client: NativeClient) -> None:
    """Set the names in the extension module `c`.

    Called by the import hook between the execution of ``torch._C`` and its first use.
    """
    global _module
    _module = c
    names: dict[str, Any] = _refusals()
    names |= _device_names(c, client)
    memory = MemoryStatistics(client)
    names |= _memory_names(memory) | _stream_names(c) | _graph_names(client)
    names |= setters(c, client)
    names |= {"_has_cuda": True, "_has_cudnn": False}
    # As in builds without CUDA: only the worker knows the best kernel, and chooses it.
    names |= dict.fromkeys(_ATTENTION, lambda params, debug: False)
    names |= {"_nvtx": _nvtx(), "_cudart": _cudart(memory)}
    names |= _others_of_cuda(c, names)
    for name, value in names.items():
        _before.setdefault(name, getattr(c, name, _ABSENT))
        setattr(c, name, value)
    for name in dir(c):
        if name.startswith(_REMOVED) and name not in names and not name.startswith("_cudnn_"):
            _before.setdefault(name, getattr(c, name))
            delattr(c, name)


def withdraw() -> None:
    """Restore the previous names: without these names torch has no CUDA device."""
    for name, value in _before.items():
        if value is _ABSENT:
            with contextlib.suppress(AttributeError):
                delattr(_module, name)
        else:
            setattr(_module, name, value)
    _before.clear()


def _refusals() -> dict[str, Any]:
    return {name: _refusal(name, why) for why, names in _REFUSALS.items() for name in names}


def _refusal(name: str, why: str) -> Callable[..., Any]:
    def refusal(*args: Any, **kwargs: Any) -> Any:
        refuse(name.removeprefix("_cuda_").lstrip("_"), why)

    refusal.__name__ = name
    return refusal


def _others_of_cuda(c: ModuleType, known: dict[str, Any]) -> dict[str, Any]:
    """Refuse names of builds with CUDA that are not `known`: they would open the GPU."""
    if not hasattr(c, "_cuda_init"):
        return {}
    why = "this process has no GPU of its own"
    others: dict[str, Any] = {}
    for name in dir(c):
        if name in known or name in _HARMLESS or not name.startswith(_OF_CUDA):
            continue
        refusal = _refusal(name, why)
        if isinstance(getattr(c, name), type):  # torch.cuda derives classes of these

            def new(cls: type, *args: Any, refusal: Callable[..., Any] = refusal, **kw: Any) -> Any:
                refusal()

            methods = [each for each in vars(getattr(c, name)) if not each.startswith("_")]
            makers = dict.fromkeys(methods, staticmethod(refusal))
            others[name] = type(name, (), {"__new__": new, **makers})
        else:
            others[name] = refusal
    return others


def _device_names(c: ModuleType, client: NativeClient) -> dict[str, Any]:
    """Return names for devices: each index is a label of the only one.

    See Note [Labels] in ``native/client/torch/labels.h``.
    """

    def init() -> None:
        # As the C++ initialisation of builds with CUDA.
        cuda = sys.modules["torch.cuda"].__dict__
        cuda["default_generators"] = _Generators((client.default_generator(),))
        cuda["_get_device_properties"] = lambda device: properties()

    def properties() -> DeviceProperties:
        return DeviceProperties(client.device())

    def set_device(index: int) -> None:
        if index >= 0:
            exchange(index)

    def exchange(index: int) -> int:
        if index < 0:
            return -1
        try:
            return int(c._accelerator_exchangeDevice(index))
        except RuntimeError as error:
            raise c.AcceleratorError(str(error)) from None

    def maybe_exchange(index: int) -> int:  # a second function: dynamo compares by identity
        return exchange(index)

    sync_debug = SimpleNamespace(mode=0)
    return {
        "_CudaDeviceProperties": DeviceProperties,
        "_cuda_init": init,
        "_cuda_getDeviceCount": client.label_count,
        "_cuda_getDevice": lambda: int(c._accelerator_getDeviceIndex()),
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": maybe_exchange,
        "_cuda_hasPrimaryContext": lambda index: index < client.label_count(),
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_isInBadFork": client.forked,
        "_cuda_synchronize": client.synchronize,
        # As in `DeviceProperties`; torch would warn about an empty list.
        "_cuda_getArchFlags": lambda: "sm_{0.major}{0.minor}".format(properties()),
        "_cuda_getCompiledVersion": lambda: 0,
        "_cuda_get_sync_debug_mode": lambda: sync_debug.mode,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(sync_debug, "mode", mode),
        "_cuda_tunableop_is_enabled": lambda: False,
        "_cuda_tunableop_tuning_is_enabled": lambda: False,
        "_cuda_record_untuned_is_enabled": lambda: False,
        "_cuda_clearCublasWorkspaces": lambda: None,
        # Imported by torch._inductor as soon as there is a device, also by torch.compiler.reset().
        "_cuda_CUDAAllocator_AllocatorState": type("_cuda_CUDAAllocator_AllocatorState", (), {}),
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_cuda_get_conv_benchmark_empty_cache": lambda: False,
    }


def _memory_names(memory: MemoryStatistics) -> dict[str, Any]:
    empty = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {
        "_cuda_memoryStats": memory.stats,
        "_cuda_resetPeakMemoryStats": memory.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": memory.reset_accumulated,
        "_cuda_emptyCache": lambda: None,  # there is no cache
        "_cuda_ipc_collect": lambda: None,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": lambda enabled: None,  # likewise
        "_cuda_setMemoryFraction": memory.set_fraction,
        "_cuda_getMemoryFraction": memory.fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_hostMemoryStats": lambda: {name: dict(empty) for name in _HOST_STATISTICS},
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_host_emptyCache": lambda: None,
        # torch.accelerator uses these instead of an allocator that only builds with CUDA have.
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": lambda: None,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_getDeviceStats": memory.accelerator_stats,
        "_accelerator_resetPeakStats": memory.reset_peak,
        "_accelerator_resetAccumulatedStats": memory.reset_accumulated,
        "_accelerator_getMemoryInfo": memory.mem_get_info,
    }


def _graph_names(client: NativeClient) -> dict[str, Any]:
    """Return names for graphs and memory pools; calls about pools have no effect."""
    pools = (
        "_cuda_beginAllocateCurrentStreamToPool",
        "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_beginAllocateToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
    )
    return {
        "_CUDAGraph": cuda_graphs.graph_type(client),
        "_MemPool": cuda_graphs.MemPool,
        "_graph_pool_handle": cuda_graphs.pool_handle,
        "_cuda_isCurrentStreamCapturing": client.capturing,
        **dict.fromkeys(pools, lambda device, pool: None),
    }


def _stream_names(c: ModuleType) -> dict[str, Any]:
    def current(device: int) -> tuple[int, int, int]:
        return int(c._accelerator_getStream(device).stream_id), device, CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        c._accelerator_setStream(
            c.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    return {
        "_CudaStreamBase": stream_base(c),
        "_CudaEventBase": event_base(c),
        "_cuda_getCurrentStream": current,
        "_cuda_getCurrentRawStream": lambda device: current(device)[0],
        "_cuda_getDefaultStream": lambda device: (0, device, CUDA),
        "_cuda_setStream": set_stream,
    }


def _cudart(memory: MemoryStatistics) -> ModuleType:
    """Return the part of the CUDA runtime that ``torch.cuda.cudart()`` exposes."""
    module = ModuleType("torch._C._cudart")

    class cudaError(int):  # noqa: N801 (its name is fixed)
        success = 0

    module.__dict__.update(
        cudaError=cudaError,
        cudaGetErrorString=lambda error: f"CUDA error {int(error)}",
        cudaMemGetInfo=memory.mem_get_info,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaHostRegister=lambda address, size, flags: refuse(
            "cudaHostRegister", "device memory lies in another process"
        ),
        cudaHostUnregister=lambda address: 0,
    )
    return module


def _nvtx() -> ModuleType:
    """Return markers for a profiler that is not attached: they do nothing, as without a proxy."""
    module = ModuleType("torch._C._nvtx")
    depth = 0

    def push(text: str) -> int:
        nonlocal depth
        depth += 1
        return depth - 1

    def pop() -> int:
        nonlocal depth
        depth = max(depth - 1, -1)
        return depth

    module.__dict__.update(
        rangePushA=push,
        rangePop=pop,
        rangeStartA=lambda text: 0,
        rangeEnd=lambda identifier: None,
        markA=lambda text: None,
        deviceRangeStart=lambda text, stream: None,
        deviceRangeEnd=lambda handle, stream: None,
    )
    return module
