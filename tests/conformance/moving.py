"""Copies of samples on a device: the same values, geometry and sharing of storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput


class Mover:
    """Copies one sample to a device.

    Tensors that share a storage share one there; each keeps its sizes, strides, offset and marks,
    and becomes a leaf of autograd.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def sample(self, sample: SampleInput) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copy a sample to the device; return its input, arguments and keywords."""
        return self.value(sample.input), self.value(sample.args), self.value(sample.kwargs)

    def value(self, value: Any) -> Any:
        """Move everything in a nest of lists, tuples and dicts."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._tensor(value)
            return self._tensors[id(value)]
        if isinstance(value, torch.device):
            return self._device if value.type == "cpu" else value
        if isinstance(value, str) and value == "cpu":
            return self._device.type
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            moved = [self.value(item) for item in value]
            if hasattr(value, "_fields"):
                return type(value)(*moved)
            return type(value)(moved)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if tensor.layout is not torch.strided:
            twin = plain.clone().to(self._device)
        elif tensor.device.type != "cpu":
            twin = plain.clone()  # tensors that are meant to be on another device
        else:
            twin = torch.empty(0, dtype=tensor.dtype, device=self._device)
            storage = self._storage(plain.untyped_storage())
            twin.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            torch._C._set_conj(twin, tensor.is_conj())
            torch._C._set_neg(twin, tensor.is_neg())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage._cdata not in self._storages:
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage._cdata] = bytes_.clone().to(self._device).untyped_storage()
        return self._storages[storage._cdata]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Collect the tensors of a nest, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
