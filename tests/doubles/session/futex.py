"""Futex waits for the doubles; the package itself only wakes."""

from __future__ import annotations

import ctypes

from kernelproxy.common import shared_memory
from kernelproxy.common.shared_memory import Page, Word

_FUTEX_WAIT = 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(page: Page, word: Word, expected: int, seconds: float) -> None:
    """Sleep while a word's low half is `expected`, for at most `seconds`."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    shared_memory._LIBC.syscall(
        ctypes.c_long(shared_memory._SYS_FUTEX),
        ctypes.c_void_p(page_address(page) + word.offset),
        _FUTEX_WAIT,
        ctypes.c_uint32(expected & 0xFFFFFFFF),
        ctypes.byref(limit),
    )


def page_address(page: Page) -> int:
    """Return the address of a mapping that may be read-only, which ctypes itself does not give."""
    buffer = (ctypes.c_char * 80)()  # Py_buffer; its first field is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(page.memory), buffer, 0)
    address = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_void_p))[0]
    ctypes.pythonapi.PyBuffer_Release(buffer)
    return int(address or 0)
