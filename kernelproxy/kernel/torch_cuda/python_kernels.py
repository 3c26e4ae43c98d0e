"""Kernels that Python code would launch in this process, which has no GPU.

An installation of ``triton`` is enough for torch itself to use some: ``torch._native`` replaces
operators (``aten::bmm`` of some shapes, norms, ``topk``) by kernels that Triton, CuTe DSL or nvmath
run. Here operators go to the worker unchanged, and its torch, which has the GPU, chooses such
kernels.

Kernels that a program launches itself are refused, with a text that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn


def install(watch: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Called before torch is imported; `watch` runs a function after a module's import."""
    watch("torch._native.registry", leave_operators)
    watch("triton.runtime.driver", refuse_triton)


def leave_operators(registry: ModuleType) -> None:
    """Prevent ``torch._native`` from replacing operators of torch, in any kernel language.

    Parameters
    ----------
    registry : module
        ``torch._native.registry``; torch's replacements have not been imported yet.
    """

    def register_op_override(*args: Any, **kwargs: Any) -> None:
        """Ignore the call: the worker's torch has the GPU, and chooses its kernels."""

    for name in ("register_op_override", "_register_op_override"):
        if hasattr(registry, name):
            setattr(registry, name, register_op_override)


def refuse_triton(module: ModuleType) -> None:
    """Make ``triton.runtime.driver`` refuse to open a GPU; its interpreter opens none."""

    def _create_driver() -> NoReturn:
        raise RuntimeError(
            "This kernel is written in Triton, which jupyter_sing cannot run yet: "
            "the GPU is in another process. Instead, use operators of torch on device 'cuda'; "
            "torch.compile makes kernels of them there."
        )

    module._create_driver = _create_driver  # type: ignore[attr-defined]
