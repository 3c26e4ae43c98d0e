"""Settings of torch that change the results of operators: the device follows them.

They are kept in C++ and set from Python by functions of ``torch._C``. Each of these is wrapped, so
that the native client reads the settings again, and sends them with its next operator.
``torch.set_flush_denormal`` is not among them: it affects one thread of this process, on CUDA, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kernelproxy.kernel.activation.native_client import NativeClient

_SETTERS = (
    "_set_blas_preferred_backend",
    "_set_cpu_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_cudnn_benchmark",
    "_set_cudnn_deterministic",
    "_set_cudnn_enabled",
    "_set_default_dtype",
    "_set_default_tensor_type",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_linalg_preferred_backend",
    "_set_math_sdp_allow_fp16_bf16_reduction",
    "_set_mkldnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_nnpack_enabled",
    "_set_sdp_priority_order",
    "_set_sdp_use_cudnn",
    "_set_sdp_use_flash",
    "_set_sdp_use_math",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_overrideable",
)


def setters(c: ModuleType, client: NativeClient) -> dict[str, Any]:
    """Return replacements for the setters that the extension module `c` has."""
    return {name: _notifying(getattr(c, name), client) for name in _SETTERS if hasattr(c, name)}


def _notifying(setter: Callable[..., Any], client: NativeClient) -> Callable[..., Any]:
    @functools.wraps(setter)
    def set_and_notify(*args: Any, **kwargs: Any) -> Any:
        try:
            return setter(*args, **kwargs)
        finally:  # some raise after they have changed the setting
            client.note_settings()

    return set_and_notify
