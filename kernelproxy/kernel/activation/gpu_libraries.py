"""Lines at the import of libraries that use GPUs themselves, and find none in this process.

Most of them only report that there is no device, or quietly compute on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

from kernelproxy.common.options import DIRECT_GPU

Watch = Callable[[str, Callable[[ModuleType], None]], None]


def _wants_a_gpu(module: ModuleType) -> bool:
    return True


def _is_not_simulated(module: ModuleType) -> bool:
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0")


def _has_plugin(module: ModuleType) -> bool:
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) is not None for name in names)


def _is_built_for_cuda(module: ModuleType) -> bool:
    try:
        return bool(module.sysconfig.get_build_info()["is_cuda_build"])
    except (AttributeError, KeyError):
        return False


#: Modules: the library's name, and whether this installation would use a GPU.
LIBRARIES: dict[str, tuple[str, Callable[[ModuleType], bool]]] = {
    "cupy": ("CuPy", _wants_a_gpu),
    "jax": ("JAX", _has_plugin),
    "numba.cuda": ("numba.cuda", _is_not_simulated),
    "pycuda.driver": ("PyCUDA", _wants_a_gpu),
    "tensorflow": ("TensorFlow", _is_built_for_cuda),
    "vllm": ("vLLM", _wants_a_gpu),
}


def install(watch: Watch) -> None:
    """Watch the imports; `watch` runs a function after a module's import."""
    for name, (shown, uses_gpu) in LIBRARIES.items():
        watch(name, partial(_report, shown, uses_gpu))


def _report(shown: str, uses_gpu: Callable[[ModuleType], bool], module: ModuleType) -> None:
    if uses_gpu(module):
        print(
            f"jupyter_sing: {shown} finds no GPU here: jupyter_sing runs torch on the GPU from "
            f"another process, and cannot do so for {shown}. Use operators of torch on device "
            f"'cuda', or set {DIRECT_GPU.variable}=1 before the kernel starts, so that it may use "
            "the GPU directly.",
            file=sys.stderr,
        )
