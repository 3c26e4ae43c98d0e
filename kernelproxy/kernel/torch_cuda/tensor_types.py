"""``torch.cuda.FloatTensor`` and its siblings, which builds without CUDA refuse to construct."""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

NAMES = {
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "HalfTensor": "float16",
    "BFloat16Tensor": "bfloat16",
    "ByteTensor": "uint8",
    "CharTensor": "int8",
    "ShortTensor": "int16",
    "IntTensor": "int32",
    "LongTensor": "int64",
    "BoolTensor": "bool",
}


class TensorType(type):
    """Metaclass: calling one of its classes makes a tensor, and tensors are their instances."""

    torch: ModuleType
    dtype: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        torch, device = cls.torch, kwargs.pop("device", "cuda")
        if kwargs:
            raise TypeError(f"{cls.__name__}() got an unexpected argument {next(iter(kwargs))!r}")
        if not args:
            return torch.empty(0, dtype=cls.dtype, device=device)
        if len(args) == 1 and not isinstance(args[0], int):
            data = args[0]
            if isinstance(data, torch.Size):
                return torch.empty(data, dtype=cls.dtype, device=device)
            return torch.as_tensor(data).to(device=device, dtype=cls.dtype)
        return torch.empty(args, dtype=cls.dtype, device=device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, cls.torch.Tensor)
            and instance.device.type == "cuda"
            and instance.dtype == cls.dtype
        )

    def __repr__(cls) -> str:
        return f"<class '{cls.__name__}'>"


def install(torch: ModuleType) -> None:
    """Add the types to ``torch.cuda``; called after the import of `torch`."""
    for name, dtype in NAMES.items():
        # Tensor.type() compares the name with which a type was made, hence the dots in it.
        made = TensorType(
            f"torch.cuda.{name}",
            (),
            {"torch": torch, "dtype": getattr(torch, dtype), "__module__": "torch.cuda"},
        )
        setattr(torch.cuda, name, made)
    _install_default(torch)


def _install_default(torch: ModuleType) -> None:
    """Allow such a type as the default type: builds without CUDA refuse it.

    The device of the type is set as the default device. A default device that the program sets
    itself has precedence, as everywhere; torch keeps one for each thread.
    """
    set_type, set_device = torch.set_default_tensor_type, torch.set_default_device
    contexts, made = torch._GLOBAL_DEVICE_CONTEXT, threading.local()
    on_device = False

    def follow() -> None:
        context = getattr(contexts, "device_context", None)
        if context is None or context is getattr(made, "context", None):
            set_device("cuda" if on_device else None)
            made.context = getattr(contexts, "device_context", None)

    @functools.wraps(set_type)
    def set_default_tensor_type(t: Any) -> None:
        nonlocal on_device
        name = t if isinstance(t, str) else getattr(t, "__name__", "")
        kind = NAMES.get(name.removeprefix("torch.cuda."))
        cuda = name.startswith("torch.cuda.") and kind is not None
        if cuda:
            torch.set_default_dtype(getattr(torch, str(kind)))
        else:
            set_type(t)
        on_device = cuda
        follow()

    @functools.wraps(set_device)
    def set_default_device(device: Any) -> None:
        set_device(device)
        made.context = None
        follow()

    torch.set_default_tensor_type = set_default_tensor_type  # type: ignore[attr-defined]
    torch.set_default_device = set_default_device  # type: ignore[attr-defined]
