"""Tries every public name of ``torch.cuda``, run under a device session.

``docs/torch-cuda.md`` says of each what it does here. Prints one JSON object for each name that
torch has: the name, and what is wrong with it or "".
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# Names left by imports in torch itself, which are not for users.
STRAYS = {
    "AcceleratorError",
    "Any",
    "Callable",
    "DEVICE_REQUIREMENT",
    "Device",
    "Iterable",
    "Literal",
    "NewType",
    "Optional",
    "OptState",
    "ParamSpec",
    "PYTORCH_RELEASES_CODE_CC",
    "Self",
    "Sequence",
    "Storage",
    "SUPPORTED",
    "TYPE_CHECKING",
    "Tensor",
    "TypeAlias",
    "TypeVar",
    "Union",
    "annotations",
    "cast",
    "classproperty",
    "contextmanager",
    "deprecated",
    "find_spec",
    "lru_cache",
    "overload",
    "signature",
}
MODULES = (
    "torch.cuda",
    "torch.cuda.memory",
    "torch.cuda.random",
    "torch.cuda.graphs",
    "torch.cuda.streams",
    "torch.cuda.amp",
    "torch.cuda.comm",
    "torch.cuda.gds",
    "torch.cuda.green_contexts",
    "torch.cuda.nccl",
    "torch.cuda.nvtx",
    "torch.cuda.profiler",
    "torch.cuda.sparse",
    "torch.cuda.tunable",
)
ROW = re.compile(r"^\| `([\w.]+)`(?: \([^)]*\))? \| (works|no-op|refused) \| (.+) \|$")


def device_tensor(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes or (2,), device="cuda")


def graphed() -> None:
    torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2).cuda(), (device_tensor(1, 2),))


def captured() -> None:
    graph, x = torch.cuda.CUDAGraph(), device_tensor()
    torch.add(x, x)
    with torch.cuda.graph(graph):
        y = torch.add(x, x)
    graph.replay()
    assert y.tolist() == [2.0, 2.0]


def entered(make: Callable[[], Any]) -> Callable[[], None]:
    def enter() -> None:
        with make():
            pass

    return enter


def deprecated(function: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return function()

    return call


def quietly(function: Callable[[], object]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function()


def scale() -> None:
    deprecated(lambda: torch.cuda.amp.GradScaler())()


def autocast_function(kind: str) -> Callable[[], object]:
    def apply() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(torch.cuda.amp, kind)(lambda ctx, x: x)(types.SimpleNamespace(), 1)

    if kind == "custom_bwd":
        return lambda: torch.cuda.amp.custom_bwd
    return apply


cuda: Any = torch.cuda  # whose types leave out some names
# The simplest use of each. Classes and constants that are not here are only read.
USES: dict[str, Callable[[], object]] = {
    "BFloat16Storage": lambda: deprecated(lambda: cuda.BFloat16Storage(2))(),
    "CUDAGraph": captured,
    "CUDAPluggableAllocator": lambda: cuda.CUDAPluggableAllocator("a.so", "a", "f"),
    "Event": lambda: cuda.Event(enable_timing=True).record(),
    "ExternalStream": lambda: cuda.ExternalStream(1234),
    "GreenContext": lambda: cuda.GreenContext.create(num_sms=1),
    "MemPool": lambda: cuda.MemPool().id,
    "Stream": lambda: cuda.Stream().synchronize(),
    "StreamContext": entered(lambda: cuda.StreamContext(cuda.Stream())),
    "caching_allocator_alloc": lambda: cuda.caching_allocator_alloc(10),
    "caching_allocator_delete": lambda: cuda.caching_allocator_delete(10),
    "caching_allocator_disabled": entered(lambda: cuda.caching_allocator_disabled()),
    "caching_allocator_enable": lambda: cuda.caching_allocator_enable(False),
    "can_device_access_peer": lambda: cuda.can_device_access_peer(0, 0),
    "change_current_allocator": lambda: cuda.change_current_allocator(
        types.SimpleNamespace(allocator=lambda: None)
    ),
    "check_error": lambda: cuda.check_error(0),
    "cudaStatus": lambda: cuda.cudaStatus.SUCCESS,
    "default_generators": lambda: cuda.default_generators[0].initial_seed(),
    "device": entered(lambda: cuda.device(0)),
    "device_of": entered(lambda: cuda.device_of(device_tensor())),
    "get_stream_from_external": lambda: cuda.get_stream_from_external(1234),
    "graph": captured,
    "has_half": lambda: cuda.has_half,
    "has_magma": lambda: cuda.has_magma,
    "make_graphed_callables": graphed,
    "manual_seed": lambda: cuda.manual_seed(1),
    "manual_seed_all": lambda: cuda.manual_seed_all(1),
    "max_memory_cached": deprecated(lambda: cuda.max_memory_cached()),
    "memory_cached": deprecated(lambda: cuda.memory_cached()),
    "reset_max_memory_allocated": deprecated(lambda: cuda.reset_max_memory_allocated()),
    "reset_max_memory_cached": deprecated(lambda: cuda.reset_max_memory_cached()),
    "set_device": lambda: cuda.set_device(0),
    "set_per_process_memory_fraction": lambda: cuda.set_per_process_memory_fraction(1.0),
    "set_rng_state": lambda: cuda.set_rng_state(cuda.get_rng_state()),
    "set_rng_state_all": lambda: cuda.set_rng_state_all(cuda.get_rng_state_all()),
    "set_stream": lambda: cuda.set_stream(cuda.default_stream()),
    "set_sync_debug_mode": lambda: cuda.set_sync_debug_mode(0),
    "stream": entered(lambda: cuda.stream(cuda.Stream())),
    "use_mem_pool": entered(lambda: cuda.use_mem_pool(cuda.MemPool())),
    "amp.GradScaler": scale,
    "amp.autocast": deprecated(lambda: entered(lambda: cuda.amp.autocast())()),
    "amp.custom_fwd": autocast_function("custom_fwd"),
    "amp.custom_bwd": autocast_function("custom_bwd"),
    "comm.broadcast": lambda: cuda.comm.broadcast(device_tensor(), [0]),
    "comm.broadcast_coalesced": lambda: cuda.comm.broadcast_coalesced([device_tensor()], [0]),
    "comm.gather": lambda: cuda.comm.gather([device_tensor()], destination=0),
    "comm.reduce_add": lambda: cuda.comm.reduce_add([device_tensor()], 0),
    "comm.reduce_add_coalesced": lambda: cuda.comm.reduce_add_coalesced([[device_tensor()]], 0),
    "comm.scatter": lambda: cuda.comm.scatter(device_tensor(), [0]),
    "gds.GdsFile": lambda: cuda.gds.GdsFile(os.devnull, os.O_RDONLY),
    "gds.gds_deregister_buffer": lambda: cuda.gds.gds_deregister_buffer(
        device_tensor().untyped_storage()
    ),
    "gds.gds_register_buffer": lambda: cuda.gds.gds_register_buffer(
        device_tensor().untyped_storage()
    ),
    "green_contexts.GreenContext": lambda: cuda.GreenContext.create(num_sms=1),
    "nccl.all_gather": lambda: cuda.nccl.all_gather([device_tensor()], [device_tensor()]),
    "nccl.all_reduce": lambda: cuda.nccl.all_reduce([device_tensor()]),
    "nccl.broadcast": lambda: cuda.nccl.broadcast([device_tensor()]),
    "nccl.init_rank": lambda: cuda.nccl.init_rank(1, b"", 0),
    "nccl.is_available": lambda: quietly(lambda: cuda.nccl.is_available([device_tensor()])),
    "nccl.reduce": lambda: cuda.nccl.reduce([device_tensor()]),
    "nccl.reduce_scatter": lambda: cuda.nccl.reduce_scatter([device_tensor()], [device_tensor()]),
    "nvtx.mark": lambda: cuda.nvtx.mark("here"),
    "nvtx.range": entered(lambda: cuda.nvtx.range("here")),
    "nvtx.range_end": lambda: cuda.nvtx.range_end(0),
    "nvtx.range_push": lambda: cuda.nvtx.range_push("here"),
    "nvtx.range_start": lambda: cuda.nvtx.range_start("here"),
    "profiler.profile": entered(lambda: cuda.profiler.profile()),
    "tunable.enable": lambda: cuda.tunable.enable(True),
    "tunable.mgpu_tune_gemm_in_file": lambda: cuda.tunable.mgpu_tune_gemm_in_file("file", 1),
    "tunable.record_untuned_enable": lambda: cuda.tunable.record_untuned_enable(True),
    "tunable.set_filename": lambda: cuda.tunable.set_filename("file"),
    "tunable.set_max_tuning_duration": lambda: cuda.tunable.set_max_tuning_duration(1),
    "tunable.set_max_tuning_iterations": lambda: cuda.tunable.set_max_tuning_iterations(1),
    "tunable.set_numerical_check_tolerances": (
        lambda: cuda.tunable.set_numerical_check_tolerances(True)
    ),
    "tunable.set_rotating_buffer_size": lambda: cuda.tunable.set_rotating_buffer_size(1),
    "tunable.tune_gemm_in_file": lambda: cuda.tunable.tune_gemm_in_file("file"),
    "tunable.tuning_enable": lambda: cuda.tunable.tuning_enable(True),
}


def rows() -> dict[str, str]:
    """Return the page's entry for each name: works, no-op or refused."""
    page = Path(__file__).resolve().parents[3] / "docs" / "torch-cuda.md"
    found = [ROW.match(line) for line in page.read_text("utf-8").splitlines()]
    return {row[1]: row[2] for row in found if row is not None}


def public() -> Iterator[tuple[str, Any]]:
    """Return the names of the modules without those that only refer to another module's."""
    seen: dict[str, Any] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        prefix = path.removeprefix("torch.cuda").lstrip(".")
        for name in sorted({*dir(module), *getattr(module, "__all__", ())}):
            value = getattr(module, name)
            if name.startswith("_") or name in STRAYS or inspect.ismodule(value):
                continue
            # torch.cuda.memory.empty_cache is torch.cuda.empty_cache.
            if prefix and seen.get(name) is value:
                continue
            if not prefix:
                seen[name] = value
            yield f"{prefix}.{name}" if prefix else name, value


def tried(name: str, value: Any, kind: str) -> str:
    """Return the problems of a name that should behave as the page says."""
    use = USES.get(name)
    if use is None and name.startswith("sparse."):
        return ""  # the page lists names only
    if use is None:
        if inspect.isclass(value) and not name.endswith(("Storage", "Tensor")):
            return "" if kind == "works" else "a class without a use here"
        if name.endswith("Storage"):
            use = deprecated(lambda: value(2))
        else:
            use = value if callable(value) else lambda: value
        if name.endswith("Tensor") and not callable(value):
            return ""
    try:
        use()
    except Exception as error:
        text = str(error).strip()
        if kind != "refused":
            return f"{type(error).__name__}: {text}"
        if not isinstance(error, RuntimeError) or len(text.splitlines()) != 1 or not text:
            return f"not one sentence: {type(error).__name__}: {text}"
        return ""
    return "it was not refused" if kind == "refused" else ""


def main() -> None:
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", ".*(TypedStorage is deprecated|legacy constructor)")
    said = rows()
    for name, value in public():
        problem = tried(name, value, said[name]) if name in said else "the page does not have it"
        print(json.dumps({"name": name, "error": problem}), flush=True)
    assert device_tensor().sum().item() == 2


if __name__ == "__main__":
    main()
