"""Patches applied after the import of ``torch``: for gaps that no name in ``torch._C`` fills.

Each patch names the C++ code that it replaces: code that is compiled only with CUDA, and tests a
constant instead of the registered device.

``torch.version.cuda`` stays as built, None in CPU wheels: libraries take it as a promise that CUDA
source can be compiled and NVIDIA's libraries can be called, which is not true here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kernelproxy.kernel.activation.native_client import NativeClient
from kernelproxy.kernel.collectives import alias
from kernelproxy.kernel.torch_cuda import tensor_sharing, tensor_types
from kernelproxy.kernel.torch_cuda.streams import refuse

_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "broadcast",
    "init_rank",
    "reduce",
    "reduce_scatter",
    "unique_id",
)
_NO_POINTERS = "device memory lies in another process"


def install(torch: ModuleType, client: NativeClient) -> None:
    """Patch the imported `torch`; called by the import hook, once."""
    # device_count() uses NVML first; that would count devices that this session does not have.
    torch.cuda._device_count_nvml = lambda: -1
    _patch_autograd(torch)
    torch.cuda._get_pynvml_handler = _no_nvml
    torch.cuda.list_gpu_processes = torch.cuda.memory.list_gpu_processes = _no_nvml
    # Recurrent modules check this at every call, and would otherwise suggest to rebuild PyTorch.
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    # Streams are only names here; a gradient from another stream does not arrive too early.
    torch._C._set_warn_on_accumulate_grad_stream_mismatch(False)
    _patch_profiler(torch)
    _patch_storage(torch, client)
    _patch_addresses(torch, client)
    tensor_sharing.install(torch)
    _patch_parallel(torch)
    _patch_refusals(torch)
    if torch.distributed.is_available():
        alias.install(torch)
    _patch_printing(torch)
    _patch_exports(torch)
    tensor_types.install(torch)


def _no_nvml(device: Any = None) -> Any:
    refuse("NVML", "it would show a GPU that other sessions use too")


def _is_cuda(torch: ModuleType, device: Any) -> bool:
    if device is None:
        return False
    if isinstance(device, int):
        return True
    return bool(torch.device(device).type == "cuda")


def _patch_storage(torch: ModuleType, client: NativeClient) -> None:
    """Patch storages on the device: ``THPStorage_pynew`` and ``resize_`` support CUDA only in CUDA
    builds.

    ``torch.load`` makes its storages here.
    """
    original_new = torch.UntypedStorage.__new__
    original_resize = torch.UntypedStorage.resize_

    @functools.wraps(original_new)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not _is_cuda(torch, kwargs.get("device")):
            return original_new(cls, *args, **kwargs)
        device = kwargs["device"]
        content = args[0] if args else kwargs.get("size", 0)
        if isinstance(content, int):
            made = torch.empty(content, dtype=torch.uint8, device=device)
        else:
            made = torch.tensor(list(content), dtype=torch.uint8).to(device)
        return made.untyped_storage()

    @functools.wraps(original_resize)
    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return original_resize(self, size)
        client.resize_storage(self, size)
        return self

    torch.UntypedStorage.__new__ = staticmethod(new)
    torch.UntypedStorage.resize_ = resize_

    _patch_storage_files(torch)


def _patch_addresses(torch: ModuleType, client: NativeClient) -> None:
    """Let Python compare addresses, which C++ must not use: Note [Guarded storages]."""

    def asking(original: Callable[[Any], int]) -> Callable[[Any], int]:
        @functools.wraps(original)
        def data_ptr(self: Any) -> int:
            address = client.address(self) if self.device.type == "cuda" else None
            return original(self) if address is None else address

        return data_ptr

    for holder in (torch.Tensor, torch.UntypedStorage):
        holder.data_ptr = asking(holder.data_ptr)


def _patch_storage_files(torch: ModuleType) -> None:
    """Patch raw storage files (old ``torch.save``, ``pickle``), which C++ accesses in place."""
    original_write = torch.UntypedStorage._write_file
    original_read = torch.UntypedStorage._set_from_file

    @functools.wraps(original_write)
    def write_file(self: Any, *args: Any) -> Any:
        return original_write(self.cpu() if self.device.type == "cuda" else self, *args)

    @functools.wraps(original_read)
    def set_from_file(self: Any, *args: Any) -> Any:
        if self.device.type != "cuda":
            return original_read(self, *args)
        host = torch.UntypedStorage(self.nbytes())
        original_read(host, *args)
        return self.copy_(host)

    torch.UntypedStorage._write_file = write_file
    torch.UntypedStorage._set_from_file = set_from_file


def _patch_profiler(torch: ModuleType) -> None:
    """Time the device by events, not by Kineto, which opens the GPU in builds with CUDA.

    If the profiler wants CUDA activities and Kineto offers none, torch puts each operator between
    two events (client/torch/profiler.cpp). Kineto counts GPUs in any case: it queries the driver
    and opens no GPU.
    """
    activity, profile = torch.profiler.ProfilerActivity, torch.profiler.profiler._KinetoProfile
    supported, original = torch.autograd._supported_activities, profile.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if activity.CUDA in self.activities:
            self.activities.add(activity.CPU)  # the events are put around its operators

    profile.__init__ = init
    # The first is for programs, which use it by default; the second is what the profiler checks
    # before it uses Kineto.
    torch.autograd._supported_activities = lambda: {*supported(), activity.CUDA}
    torch.autograd.profiler._supported_activities = lambda: {*supported()} - {activity.CUDA}


def _patch_autograd(torch: ModuleType) -> None:
    """Run all backward passes in the threads that call them, as there are no others.

    See `NativeClient.keep_autograd_single_threaded`. A thread in which no operator of the device
    was called needs this.
    """
    engine = torch.autograd.Variable._execution_engine
    single = torch.autograd.set_multithreading_enabled

    class SingleThreadedEngine(type(engine)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            with single(False):
                return super().run_backward(*args, **kwargs)

    torch.autograd.Variable._execution_engine = SingleThreadedEngine()


def _patch_parallel(torch: ModuleType) -> None:
    """Patch ``nn.DataParallel`` for the only device: scattering and gathering are copies."""

    def scatter(tensor: Any, devices: Any, *args: Any) -> tuple[Any, ...]:
        if len(devices) != 1:
            refuse("More than one device", "a session has one device")
        return (tensor.to(torch.device("cuda", devices[0])),)

    def broadcast(tensors: Any, devices: Any, *args: Any) -> list[list[Any]]:
        return [list(scatter(tensor, devices)) for tensor in tensors]

    def gather(tensors: Any, axis: int, device: int | None) -> Any:
        found = torch.cat(list(tensors), axis)
        return found.cpu() if device == -1 else found

    torch._C._scatter = scatter
    torch._C._broadcast_coalesced = lambda tensors, devices, size: broadcast(tensors, devices)
    torch._C._broadcast = lambda tensor, devices: list(scatter(tensor, devices))
    torch._C._gather = gather


def _patch_refusals(torch: ModuleType) -> None:
    """Refuse what would fail before it reached the name in ``torch._C`` that refuses."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        refuse("NCCL", "a session has one device, cuda:0")

    def allocator(*args: Any, **kwargs: Any) -> Any:
        refuse("An allocator of one's own", _NO_POINTERS)

    def tune(*args: Any, **kwargs: Any) -> Any:
        refuse("Tuning", "the device's libraries are not in this process")

    def gds(*args: Any, **kwargs: Any) -> Any:
        refuse("GPUDirect Storage", _NO_POINTERS)

    for name in _COLLECTIVES:
        setattr(torch.cuda.nccl, name, collective)
    torch.cuda.gds.GdsFile.__new__ = gds
    torch.cuda.memory.CUDAPluggableAllocator.__init__ = allocator
    torch.cuda.tunable.tune_gemm_in_file = torch.cuda.tunable.mgpu_tune_gemm_in_file = tune


def _patch_printing(torch: ModuleType) -> None:
    """Print device tensors from a copy: printing reads element by element, a round trip each."""
    tensor_str = torch._tensor_str
    original: Callable[..., str] = tensor_str._tensor_str

    @functools.wraps(original)
    def print_copy(self: Any, indent: int) -> str:
        if self.device.type == "cuda" and self.layout is torch.strided:
            self = _host_copy(torch, self, tensor_str.PRINT_OPTS)
        return original(self, indent)

    tensor_str._tensor_str = print_copy


def _host_copy(torch: ModuleType, tensor: Any, options: Any) -> Any:
    """Copy a tensor to the host; of a large one, only the printed elements."""
    if tensor.numel() <= options.threshold:
        return tensor.cpu()
    edge = options.edgeitems
    shown, places = tensor, []
    for axis, size in enumerate(tensor.shape):
        if size > 2 * edge:
            place = torch.cat((torch.arange(edge), torch.arange(size - edge, size)))
            shown = shown.index_select(axis, place.to(tensor.device))
        else:
            place = torch.arange(size)
        places.append(place)
    # The rest is neither written nor read, and so never takes memory.
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    host[torch.meshgrid(*places, indexing="ij")] = shown.cpu()
    return host


def _patch_exports(torch: ModuleType) -> None:
    """Refuse to export addresses of device memory to other libraries in this process."""
    original_dlpack = torch.Tensor.__dlpack__
    original_interface = torch.Tensor.__cuda_array_interface__
    original_capsule = torch._C._to_dlpack

    @functools.wraps(original_dlpack)
    def dlpack(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":
            raise BufferError(f"A device tensor cannot be exported: {_NO_POINTERS}; use .cpu().")
        return original_dlpack(self, *args, **kwargs)

    @functools.wraps(original_capsule)
    def capsule(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cuda":
            raise BufferError(f"A device tensor cannot be exported: {_NO_POINTERS}; use .cpu().")
        return original_capsule(tensor, *args, **kwargs)

    def interface(self: Any) -> Any:
        if self.device.type == "cuda":
            # AttributeError, so that libraries which use hasattr() choose another way.
            raise AttributeError(
                f"A device tensor has no __cuda_array_interface__: {_NO_POINTERS}; use .cpu()."
            )
        return original_interface.__get__(self)

    torch.Tensor.__dlpack__ = dlpack
    torch.Tensor.__cuda_array_interface__ = property(interface)
    torch._C._to_dlpack = capsule
    for module in (torch, torch.utils.dlpack):
        if getattr(module, "to_dlpack", None) is original_capsule:
            module.__dict__["to_dlpack"] = capsule
