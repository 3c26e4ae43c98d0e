"""Tensors of the device that a collective replaces."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from kernelproxy.kernel.collectives.group import Call
from kernelproxy.kernel.collectives.host_threads import one_thread
from kernelproxy.kernel.collectives.transfers import Tensor, Tensors, cut, read, write
from kernelproxy.kernel.collectives.tree import Reduction

#: Smaller tensors keep their memory while a collective replaces them.
VACATED_BYTES_MIN = 1 << 20


class Replacement:
    """Context in which a collective replaces device tensors.

    Note [Vacated]: their elements are read as soon as they are computed, also if the collectives
    before must wait for other ranks, but not if one of these may change them. From then on, large
    tensors take no memory of the device: the elements are in the memory from which they are sent.
    So a rank that waits for its peers keeps no gradients on a device that it shares with them. If
    the collective fails, they are restored.

    Parameters
    ----------
    tensors : sequence of Tensor
        All of one dtype.
    reduction : Reduction
        Its contribution is computed when they are read.
    """

    def __init__(self, tensors: Tensors, reduction: Reduction) -> None:
        self._tensors, self._reduction = tensors, reduction
        #: What the collective changes.
        self.storages = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
        bytes_each = [tensor.nbytes for tensor in tensors]
        whole = bytes_each == [tensor.untyped_storage().nbytes() for tensor in tensors]
        #: Whether they take no memory meanwhile; then the elements must not be changed. If the read
        #: of a second tensor failed, the first one would be lost.
        self.vacates = (
            whole
            and len(tensors) == 1
            and bytes_each[0] >= VACATED_BYTES_MIN
            and reduction.name != "PREMUL_SUM"
        )
        self._elements: Tensor | None = None
        self._problem: BaseException | None = None
        # Set unless another thread takes the elements.
        self._taken = threading.Event()
        self._taken.set()

    def ahead(self, call: Call) -> None:
        """Have large tensors read by a thread, after those of earlier calls."""
        if not self.vacates:
            return
        self._taken.clear()
        call.group.lane("ahead").submit(lambda: self._take_there(call))

    def _take_there(self, call: Call) -> None:
        try:
            with torch.inference_mode(), one_thread():
                self._take(call)
        except Exception as error:
            self._problem = error
        finally:
            self._taken.set()

    def _take(self, call: Call) -> None:
        vacates = self.vacates and call.size > 1
        names = call.names("of", call.rank)
        found = self._elements = read(call.group, self._tensors, names, last=vacates)
        self._elements = self._reduction.contribution(found)

    def take(self, call: Call) -> Tensor:
        """Return what this rank contributes."""
        self._taken.wait()
        if self._elements is None and self._problem is None:
            self.ahead(call)  # an interrupt of this thread loses nothing
            self._taken.wait()
        if self._problem is not None:
            raise self._problem
        if self._elements is None:
            self._take(call)
        assert self._elements is not None
        return self._elements

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._taken.wait()
        elements, self._elements = self._elements, None
        if error is None or elements is None or not self.vacates:
            return
        parts = cut(elements, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            write(tensor, part)
