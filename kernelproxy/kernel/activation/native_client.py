"""Typed Python interface of the native client, `libsing_client.so`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from kernelproxy.common.errors import NativeError

# In the order of their dependencies. The first loads what torch's own loader would load.
TORCH_LIBRARIES = (
    "libtorch_global_deps.so",
    "libc10.so",
    "libtorch_cpu.so",
    "libtorch.so",
    "libtorch_python.so",
)
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "sing_client_connect": ([ctypes.c_int] * 5, ctypes.c_int),
    "sing_client_register": ([], None),
    "sing_client_on_first_use": ([ctypes.py_object], ctypes.py_object),
    "sing_client_keep_autograd_single_threaded": ([], ctypes.py_object),
    "sing_client_label_count": ([], ctypes.c_int),
    "sing_client_error": ([], ctypes.c_char_p),
    "sing_client_synchronize": ([], ctypes.py_object),
    "sing_client_memory": ([], ctypes.py_object),
    "sing_client_reset_peak": ([], None),
    "sing_client_limit_memory": ([ctypes.c_uint64], None),
    "sing_client_capture_begin": ([], ctypes.py_object),
    "sing_client_capture_end": ([ctypes.py_object], ctypes.py_object),
    "sing_client_replay": ([ctypes.py_object], ctypes.py_object),
    "sing_client_capturing": ([], ctypes.c_int),
    "sing_client_statistics": ([], ctypes.py_object),
    "sing_client_device": ([], ctypes.py_object),
    "sing_client_default_generator": ([], ctypes.py_object),
    "sing_client_note_settings": ([], None),
    "sing_client_cell": ([ctypes.c_int], None),
    "sing_client_await_peers": ([ctypes.c_int], None),
    "sing_client_give_up": ([], None),
    "sing_client_take_over_operators": ([], ctypes.py_object),
    "sing_client_forked": ([], ctypes.c_int),
    "sing_client_leave": ([ctypes.c_int], ctypes.py_object),
    "sing_client_rejoin": ([ctypes.c_int] * 5, ctypes.py_object),
    "sing_client_storage_number": ([ctypes.py_object], ctypes.py_object),
    "sing_client_copy_named": (
        [ctypes.py_object, ctypes.py_object, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int],
        ctypes.py_object,
    ),
    "sing_client_premultiplier": ([ctypes.py_object], ctypes.py_object),
    "sing_client_position": ([], ctypes.c_uint64),
    "sing_client_address": ([ctypes.py_object], ctypes.py_object),
    "sing_client_resize_storage": ([ctypes.py_object, ctypes.c_uint64], ctypes.py_object),
}


class NativeClient:
    """Functions of the native client; the docstrings say what they do there.

    Parameters
    ----------
    library : ctypes.PyDLL or object
        The library; functions are called with the GIL held and release it where they wait.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls, path: Path, torch_directory: Path) -> NativeClient:
        """Load the client and, before it, the torch libraries that it needs.

        Raises
        ------
        NativeError
            If one of them cannot be loaded, or the client lacks a function.
        """
        try:
            for name in TORCH_LIBRARIES:
                ctypes.CDLL(str(torch_directory / "lib" / name), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
            library = ctypes.PyDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
            for name, (arguments, result) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
        except (OSError, AttributeError) as error:
            raise NativeError(f"the native client cannot be loaded ({error})") from error
        return cls(library)

    def connect(self, fds: Sequence[int], bell_fd: int) -> None:
        """Join a session, given its log and its client, worker and agent pages.

        The caller remains the owner of `fds`. The client takes ownership of `bell_fd`, but its
        connection may be replaced by another one (``dup2``).

        Raises
        ------
        NativeError
            If they are not valid.
        """
        if self._library.sing_client_connect(*fds, bell_fd) != 0:
            text = self._library.sing_client_error() or b"unknown reason"
            raise NativeError(f"the session cannot be joined ({text.decode(errors='replace')})")

    def register(self) -> None:
        """Register the device with torch, before torch is imported."""
        self._library.sing_client_register()

    def on_first_use(self, opener: Callable[[], object]) -> None:
        """Set the function that joins a session, by `connect`, when the device is used without one.

        It is called in this process and in those forked from it; what it raises is raised by the
        operator.
        """
        self._library.sing_client_on_first_use(opener)

    def keep_autograd_single_threaded(self) -> None:
        """Make backward passes run in the threads that call them, also in forked children.

        Called after the import of torch, before the first backward pass.
        """
        self._library.sing_client_keep_autograd_single_threaded()

    def label_count(self) -> int:
        """Number of devices that programs see; each is a label of the session's device."""
        return int(self._library.sing_client_label_count())

    def leave(self, seconds: float) -> None:
        """Release the session's memory for a while; users of the device block until `rejoin`.

        The caller gets the bell back; it is not rung until then.

        Raises
        ------
        NativeError
            If a thread waits for the device for longer than `seconds`; nothing has changed then.
        """
        try:
            self._library.sing_client_leave(round(seconds * 1000))
        except RuntimeError as error:
            raise NativeError(f"the session cannot be left ({error})") from error

    def rejoin(self, fds: Sequence[int], bell_fd: int) -> None:
        """Join the released session again, or another one in the same state; as `connect`.

        Raises
        ------
        NativeError
            If it is neither; threads that use the device keep waiting.
        """
        try:
            self._library.sing_client_rejoin(*fds, bell_fd)
        except RuntimeError as error:
            raise NativeError(f"the session cannot be joined again ({error})") from error

    def synchronize(self) -> None:
        """Wait until everything is executed.

        Raises
        ------
        RuntimeError
            Error of an operator since the last synchronisation.
        KeyboardInterrupt
            If the user interrupts the wait.
        """
        self._library.sing_client_synchronize()

    def memory(self) -> dict[str, int]:
        """Return counters of memory.

        In bytes: used, peak, granted, total, free, and over time bytes_allocated, bytes_freed;
        as numbers: allocations, frees, live_peak, out_of_memory.
        """
        return dict(self._library.sing_client_memory())

    def limit_memory(self, count: int) -> None:
        """Limit the device memory of this process."""
        self._library.sing_client_limit_memory(count)

    def capture_begin(self) -> Any:
        """Record operators from here on instead of executing them; return the recording."""
        return self._library.sing_client_capture_begin()

    def capture_end(self, capture: Any) -> None:
        """End the recording: execute operators again."""
        self._library.sing_client_capture_end(capture)

    def replay(self, capture: Any) -> None:
        """Execute the recorded operators."""
        self._library.sing_client_replay(capture)

    def capturing(self) -> bool:
        """True while operators are recorded."""
        return bool(self._library.sing_client_capturing())

    def reset_peak(self) -> None:
        """Reset the peak to the current use."""
        self._library.sing_client_reset_peak()

    def statistics(self) -> dict[str, int]:
        """Return counters: operators, records, bytes, cache_hits, cache_misses, requests."""
        return dict(self._library.sing_client_statistics())

    def device(self) -> dict[str, Any]:
        """Return the device's properties: kind ("software" or "cuda"), name, total (bytes),
        threads; for a GPU also capability (900 for 9.0) and processors.
        """
        return dict(self._library.sing_client_device())

    def default_generator(self) -> Any:
        """Return the device's default `torch.Generator`."""
        return self._library.sing_client_default_generator()

    def resize_storage(self, storage: Any, size: int) -> None:
        """Resize a device `torch.UntypedStorage`, in bytes; content that fits is kept."""
        self._library.sing_client_resize_storage(storage, size)

    def address(self, holder: Any) -> int | None:
        """Return the address of a tensor or storage of the device; it cannot be dereferenced here.

        None if `holder` is not on the device.
        """
        return cast("int | None", self._library.sing_client_address(holder))

    def storage_number(self, storage: Any) -> int:
        """Number of a device `torch.UntypedStorage` in the log and in snapshots."""
        return int(self._library.sing_client_storage_number(storage))

    def position(self) -> int:
        """Position of the log that the next record will have."""
        return int(self._library.sing_client_position())

    def take_over_operators(self) -> None:
        """Route operators defined since the last call to the worker, if they belong there.

        That also happens soon after each definition; see Note [Foreign kernels].
        """
        self._library.sing_client_take_over_operators()

    def note_settings(self) -> None:
        """Apply torch's current settings to the device, from the next operator on."""
        self._library.sing_client_note_settings()

    def cell(self, change: int) -> None:
        """Notify the agent that a cell began (1) or ended (-1)."""
        self._library.sing_client_cell(change)

    def copy_named(self, to: Any, source: Any, name: tuple[int, int], last: bool) -> None:
        """Copy a tensor between host and device, as ``copy_``; its bytes there have this name.

        An interrupt cannot leave the name to the next copy.

        Parameters
        ----------
        to, source : torch.Tensor
        name : tuple of int
        last : bool
            Whether a whole storage of the device is read, which is not used again until it was
            overwritten as a whole: ranks that share a device take no memory for it until then.
        """
        self._library.sing_client_copy_named(to, source, *name, int(last))

    def premultiplier(self, op: Any) -> Any:
        """Return the factor of a boxed ``ReduceOp`` of kind PREMUL_SUM."""
        return self._library.sing_client_premultiplier(op)

    def await_peers(self, waiting: int) -> None:
        """Let the device execute other ranks while this process waits for them."""
        self._library.sing_client_await_peers(waiting)

    def give_up(self) -> None:
        """Fail all waits for the device, now and later: the daemon is gone."""
        self._library.sing_client_give_up()

    def forked(self) -> bool:
        """True if this process was forked from one that joined, and cannot open a session."""
        return bool(self._library.sing_client_forked())
