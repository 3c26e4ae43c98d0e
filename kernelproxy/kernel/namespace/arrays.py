"""NumPy arrays: owners of memory are saved once, views as windows into them."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from array import array
from contextlib import suppress
from typing import Any

from kernelproxy.kernel.namespace import rebuild
from kernelproxy.kernel.namespace.memory_ranges import Memory, at_address
from kernelproxy.kernel.namespace.types import Reduced, Unsaveable


class Block:
    """Memory without a plain array that owns all of it; restored as a flat array of bytes."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner


class Arrays:
    """Reduces arrays for one capture.

    Parameters
    ----------
    memory : Memory
        Known memory of this process.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._np = sys.modules["numpy"]
        #: The most frequent type of arrays.
        self.plain = self._np.ndarray

    def rule(self, kind: type) -> Any:
        """Return the reducer for objects of a type, or None if it is not an array type."""
        np = self._np
        if kind is np.ndarray:
            return self._array
        if kind is np.memmap:
            return self._subclass
        # Naming `np.ma` would import it while the notebook waits; not imported, it has no objects.
        masked = sys.modules.get("numpy.ma")
        if masked is not None and kind is getattr(masked, "MaskedArray", None):
            return self._masked
        if issubclass(kind, np.ndarray) and kind.__reduce__ is np.ndarray.__reduce__:
            return self._subclass
        return None

    def meet(self, a: Any) -> None:
        """Register the owner of an array's memory; errors are reported when the array is saved."""
        if not a.dtype.hasobject and a.nbytes:
            with suppress(Unsaveable):
                if self._memory.find(*extent(a)) is None:
                    self._own(a)

    def block(self, block: Block) -> Reduced:
        """Reduce memory that has no array of its own."""
        return rebuild.array, (self._content(block.address, block.nbytes, block), (block.nbytes,),
                               self._np.dtype("u1"), "C", True)  # fmt: skip

    def _array(self, a: Any) -> Reduced | Any:
        if a.dtype.hasobject:
            return self._of_objects(a)
        if not a.nbytes:
            content = pickle.PickleBuffer(b"")
            return rebuild.array, (content, a.shape, a.dtype, "C", a.flags.writeable)
        lowest, nbytes = extent(a)
        found = self._memory.find(lowest, nbytes)
        if found is None:
            self._own(a)
            found = self._memory.find(lowest, nbytes)
            assert found is not None
        owner, offset = found
        if owner is a:
            order = "C" if a.flags.c_contiguous else "F"
            content = self._content(lowest, nbytes, a)
            return rebuild.array, (content, a.shape, a.dtype, order, a.flags.writeable)
        offset += address(a) - lowest  # negative strides start at the end
        return rebuild.window, (owner, offset, a.shape, a.dtype, a.strides, a.flags.writeable)

    def _content(self, start: int, nbytes: int, owner: Any) -> pickle.PickleBuffer:
        return pickle.PickleBuffer(at_address(start, nbytes, owner))

    def _own(self, a: Any) -> None:
        """Find the owner of an array's memory, and register it.

        Raises
        ------
        Refused
            If this process shares the memory with a file or with others.
        """
        np = self._np
        root = a
        while isinstance(root.base, np.ndarray):
            root = root.base
        exporter = root.base
        while isinstance(exporter, memoryview):
            exporter = exporter.obj
        if isinstance(root, np.memmap) and isinstance(exporter, mmap.mmap):
            self._map(root)
            return
        if isinstance(exporter, bytes | bytearray | array):
            # The exporter is saved as itself; its other users will share these bytes again.
            exported = np.frombuffer(exporter, np.uint8)
            self._memory.add(address(exported), exported.nbytes, exporter)
            return
        if isinstance(exporter, mmap.mmap):
            raise Unsaveable("an array over a memory map")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(exporter, torch.Tensor):
            storage = exporter.untyped_storage()
            self._memory.add(storage.data_ptr(), storage.nbytes(), storage)
            return
        lowest, nbytes = extent(root)
        plain = type(root) is np.ndarray and (root.flags.c_contiguous or root.flags.f_contiguous)
        self._memory.add(lowest, nbytes, root if plain else Block(lowest, nbytes, root))

    def _map(self, root: Any) -> None:
        """Register a memory-mapped file: by name if this process cannot change it."""
        lowest, nbytes = extent(root)
        if root.mode == "c":  # changes are this process' own
            self._memory.add(lowest, nbytes, Block(lowest, nbytes, root))
        elif root.mode == "r":
            self._memory.add(lowest, nbytes, MappedFile(root))
        else:
            raise Unsaveable(f"a writable memory map of {root.filename}")

    def _subclass(self, a: Any) -> Reduced:
        plain = a.view(self._np.ndarray)
        kind = type(a)
        if kind is self._np.memmap and not isinstance(a.base, self._np.ndarray | mmap.mmap):
            kind = self._np.ndarray  # result of a computation with a map: plain memory
        of_file = isinstance(a, self._np.memmap)
        state = {} if of_file else dict(getattr(a, "__dict__", {}))
        return rebuild.subclass, (plain, kind, a.dtype), state, None, None, rebuild.array_state

    def _masked(self, a: Any) -> Reduced:
        state = {
            name: getattr(a, name)
            for name in ("_fill_value", "_hardmask", "_sharedmask", "_optinfo")
            if name in vars(a)
        }
        mask = a._mask if a._mask is not self._np.ma.nomask else None
        return rebuild.masked, (a._data, mask), state, None, None, rebuild.array_state

    def _of_objects(self, a: Any) -> Reduced | Any:
        root = a
        while isinstance(root.base, self._np.ndarray):
            root = root.base
        if root is a:
            return NotImplemented  # NumPy's default: element by element, in the stream
        if type(root) is not self._np.ndarray or root.dtype != a.dtype or not (
            root.flags.c_contiguous or root.flags.f_contiguous
        ):  # fmt: skip
            raise Unsaveable("a view of an array of objects")
        offset = address(a) - address(root)
        return rebuild.window_of_objects, (root, offset, a.shape, a.strides)


class MappedFile:
    """File that is mapped for reading."""

    def __init__(self, root: Any) -> None:
        self.root, self.file = root, os.stat(root.filename)

    def __reduce__(self) -> Reduced:
        identity = (self.file.st_size, self.file.st_mtime_ns)
        place = (os.fspath(self.root.filename), int(self.root.offset), int(self.root.nbytes))
        return rebuild.mapped, (*place, *identity)


def address(a: Any) -> int:
    """Return the address of an array's first element."""
    return int(a.__array_interface__["data"][0])


def extent(a: Any) -> tuple[int, int]:
    """Return the lowest address of a non-empty array, and the bytes from there to its end."""
    low = high = 0
    for count, stride in zip(a.shape, a.strides, strict=True):
        low, high = low + min(0, (count - 1) * stride), high + max(0, (count - 1) * stride)
    return address(a) + low, high - low + a.itemsize
