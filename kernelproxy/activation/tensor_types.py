"""``torch.cuda.FloatTensor`` and its siblings, which builds without CUDA refuse to construct."""

from __future__ import annotations

import functools
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
    """Put the types into ``torch.cuda``; called when `torch` was imported."""
    for name, dtype in NAMES.items():
        # Tensor.type() compares the name that a type was made with, hence the dots in it.
        made = TensorType(
            f"torch.cuda.{name}",
            (),
            {"torch": torch, "dtype": getattr(torch, dtype), "__module__": "torch.cuda"},
        )
        setattr(torch.cuda, name, made)
    original = torch.set_default_tensor_type

    @functools.wraps(original)
    def set_default_tensor_type(t: Any) -> None:
        name = t if isinstance(t, str) else getattr(t, "__name__", "")
        kind = NAMES.get(name.removeprefix("torch.cuda."))
        if not name.startswith("torch.cuda.") or kind is None:
            original(t)
            return
        torch.set_default_dtype(getattr(torch, kind))
        torch.set_default_device("cuda")

    torch.set_default_tensor_type = set_default_tensor_type  # type: ignore[attr-defined]
