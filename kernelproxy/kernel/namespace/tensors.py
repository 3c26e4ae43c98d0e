"""Reducers for torch's tensors, storages and generators.

The unit is the storage: each is saved once, host memory as a buffer, device memory by its number in
the device session. Tensors are windows into storages.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from kernelproxy.kernel.namespace import rebuild
from kernelproxy.kernel.namespace.memory_ranges import Memory, at_address
from kernelproxy.kernel.namespace.types import INLINE_BYTES, DevicePart, Reduced, Unsaveable

GRAPH = "its value is saved, its autograd graph is not"


class Tensors:
    """Reducer of torch's objects for one capture.

    Parameters
    ----------
    memory : Memory
        Known memory of this process.
    device : DevicePart or None
        Device session.
    note : callable
        Called with an object and a line about a part of it that is not saved.
    """

    def __init__(
        self, memory: Memory, device: DevicePart | None, note: Callable[[Any, str], None]
    ) -> None:
        self._torch: Any = sys.modules["torch"]
        self._memory, self._device, self._note = memory, device, note
        self._storages: dict[int, Any] = {}  # by the address of torch's own object; kept alive
        #: Device storages seen so far: number and bytes. May contain one twice.
        self.numbers: list[tuple[int, int]] = []

    def rule(self, kind: type) -> Any:
        """Return the reducer for objects of a type, or None if it is not torch's."""
        torch = self._torch
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor
        if issubclass(kind, torch.Tensor):
            return self._other_tensor
        if kind is torch.UntypedStorage:
            return self._storage
        if kind is torch.storage.TypedStorage:
            return self._typed_storage
        if kind is torch.Generator:
            return self._generator
        if issubclass(kind, torch.optim.Optimizer):
            return self._optimizer
        return None

    def _tensor(self, t: Any) -> Reduced | Any:
        torch = self._torch
        if (
            t.layout is not torch.strided
            or t.device.type == "meta"
            or t.is_quantized
            or t.is_nested
        ):
            return self._other_tensor(t)
        if torch._C._functorch.is_functorch_wrapped_tensor(t):
            raise Unsaveable("a tensor inside a torch.func transform")
        kind = "parameter" if type(t) is torch.nn.Parameter else "tensor"
        if t.is_inference():
            kind = "inference"
        leaf = self._leaf(t)
        state: dict[str, Any] = {"requires_grad": t.requires_grad and leaf}
        if (leaf or t.retains_grad) and t.grad is not None:
            state["grad"] = t.grad
        if leaf and t._backward_hooks:
            state["hooks"] = t._backward_hooks
        if leaf and t._post_accumulate_grad_hooks:
            state["accumulated_hooks"] = t._post_accumulate_grad_hooks
        if vars(t):
            state["attributes"] = dict(vars(t))
        bits = torch._utils.get_tensor_metadata(t)
        storage = self._canonical(t.untyped_storage())
        made = (storage, t.dtype, t.storage_offset(), tuple(t.size()), t.stride(), bits, kind)
        return rebuild.tensor, made, state, None, None, rebuild.tensor_state

    def _leaf(self, t: Any) -> bool:
        """True if a tensor has no autograd history; a history is reported by a note."""
        if t.grad_fn is None:
            return True
        self._note(t, GRAPH)
        return False

    def _other_tensor(self, t: Any) -> Reduced | Any:
        """Leave to torch what it reduces itself: sparse, quantized, nested tensors, subclasses."""
        if self._leaf(t) and t.grad is not None:
            self._note(t, "its value is saved, its .grad is not")
        return NotImplemented

    def _canonical(self, storage: Any) -> Any:
        """Return the Python object that represents a storage."""
        return self._storages.setdefault(storage._cdata, storage)

    def _storage(self, storage: Any) -> Reduced:
        first = self._canonical(storage)
        if first is not storage:
            return rebuild.same, (first,)
        nbytes = storage.nbytes()
        if self._device is not None and self._device.holds(storage):
            if nbytes < INLINE_BYTES:
                return rebuild.small_storage_on_device, (bytes(self._device.read(storage)),)
            number = self._device.number(storage)
            self.numbers.append((number, nbytes))
            return rebuild.storage_on_device, (number, nbytes)
        if storage.device.type != "cpu":
            raise Unsaveable(f"memory of the device {storage.device}")
        address = storage.data_ptr() if nbytes else 0
        if nbytes:
            found = self._memory.find(address, nbytes)
            if found is None:
                self._memory.add(address, nbytes, storage)
            elif found[0] is not storage:
                return rebuild.storage_in_array, (*found, nbytes)
        memory = at_address(address, nbytes, storage) if nbytes else b""
        content = pickle.PickleBuffer(memory)
        return rebuild.storage, (content, nbytes, storage.is_shared())

    def _typed_storage(self, storage: Any) -> Reduced:
        return rebuild.typed_storage, (self._canonical(storage._untyped_storage), storage.dtype)

    def _generator(self, generator: Any) -> Reduced:
        torch = self._torch
        if generator is torch.default_generator:
            return rebuild.default_generator, ("cpu", 0)
        for index, default in enumerate(torch.cuda.default_generators):
            if generator is default:
                return rebuild.default_generator, ("cuda", index)
        return rebuild.generator, (str(generator.device), bytes(generator.get_state().tolist()))

    def _optimizer(self, optimizer: Any) -> Any:
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if any(vars(optimizer).get(name) for name in hooks):
            self._note(optimizer, "it is saved, the hooks of its step are not")
        return NotImplemented
