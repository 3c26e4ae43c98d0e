"""The native library of a worker, through ctypes: `native/worker/loop/api.h`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from kernelproxy.common.errors import ProtocolError
from kernelproxy.common.ipc.framing import send_message
from kernelproxy.common.protocol import EXIT_DEVICE_LOST, DeviceLost, Open

CALLBACK = ctypes.CFUNCTYPE(None)
#: `SING_WORKER_LOST` and `SING_WORKER_NO_ROOM`
LOST, NO_ROOM = -2, -3


class Files(ctypes.Structure):
    """`sing_worker_files`."""

    _names = ("log", "client", "worker", "agent", "arena")
    _optional = ("snapshot", "readiness", "contents", "carried", "base")
    _fields_ = [(name, ctypes.c_int) for name in (*_names, *_optional)]

    @classmethod
    def of(cls, order: Open, fds: list[int]) -> Files:
        """Return the descriptors that came with a command, by name.

        Raises
        ------
        ProtocolError
            If their number does not match the command.
        """
        names = [*cls._names, *(name for name in cls._optional if getattr(order, name))]
        if len(fds) != len(names):
            raise ProtocolError("A worker's first order came with other descriptors than it says.")
        return cls(**{**dict.fromkeys(cls._optional, -1), **dict(zip(names, fds, strict=True))})


class WorkerSnapshot(ctypes.Structure):
    """`sing_worker_taken`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("position", "bytes", "copied", "stalled_ns", "duration_ns")
    ]


class WorkerDeparture(ctypes.Structure):
    """`sing_worker_departed`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("copied", "omitted")] + [
        (name, ctypes.c_int) for name in ("tables", "contents", "carried")
    ]


class WorkerStep(ctypes.Structure):
    """`sing_worker_step`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("records", "nadir", "memory_min", "memory_max", "made", "ns")
    ]


class SeatCounts(ctypes.Structure):
    """`sing_worker_seat_counts`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("switches", "switch_ns", "executed", "squashed", "recomputed", "held_max")
    ]


class SkippedRecord(ctypes.Structure):
    """`sing_worker_skip`."""

    _fields_ = [
        ("position", ctypes.c_uint64), ("why", ctypes.c_char_p), ("starved", ctypes.c_int)
    ]  # fmt: skip


class Loss(ctypes.Structure):
    """`sing_worker_loss`."""

    _fields_ = [
        ("code", ctypes.c_int), ("position", ctypes.c_uint64), ("operation", ctypes.c_char_p)
    ]  # fmt: skip


def load(path: Path) -> ctypes.CDLL:
    """Load the worker library (`native/worker/loop/api.h`); torch must be imported already.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """
    library = ctypes.CDLL(str(path))
    c_int, u64 = ctypes.c_int, ctypes.c_uint64
    library.sing_worker_key_bytes.restype = u64
    library.sing_worker_seat.argtypes = [c_int, ctypes.c_char_p, u64]
    library.sing_worker_warm.argtypes = [ctypes.c_char_p]
    library.sing_worker_open.argtypes = [
        ctypes.POINTER(Files), ctypes.c_char_p, c_int, u64,
        ctypes.POINTER(SkippedRecord), c_int, u64, c_int,
    ]  # fmt: skip
    library.sing_worker_gate.argtypes = [c_int, c_int]
    library.sing_worker_lease.argtypes = [c_int, u64, c_int]
    library.sing_worker_take_lease.argtypes = [c_int, u64, u64]
    library.sing_worker_observe.argtypes = [c_int, u64, ctypes.POINTER(WorkerStep)]
    library.sing_worker_give_back_cache.argtypes = [c_int, ctypes.POINTER(u64)]
    library.sing_worker_close.restype = None
    library.sing_worker_end_seat.restype = None
    library.sing_worker_seat_figures.argtypes = [ctypes.POINTER(SeatCounts)]
    library.sing_worker_seat_figures.restype = None
    library.sing_worker_end.restype = None
    library.sing_worker_hurry.restype = None
    library.sing_worker_drop.restype = None
    library.sing_worker_snapshot.argtypes = [
        c_int, c_int, CALLBACK, ctypes.POINTER(WorkerSnapshot)
    ]  # fmt: skip
    library.sing_worker_depart.argtypes = [c_int, c_int, ctypes.POINTER(WorkerDeparture)]
    library.sing_worker_on_no_room.argtypes = [CALLBACK]
    library.sing_worker_on_no_room.restype = None
    library.sing_worker_adopt.argtypes = [c_int, c_int]
    library.sing_worker_replay.argtypes = [c_int, u64]
    library.sing_worker_lost.argtypes = [ctypes.POINTER(Loss)]
    library.sing_worker_lost.restype = None
    library.sing_worker_error.restype = ctypes.c_char_p
    return library


def end_without_device(control: socket.socket, library: ctypes.CDLL) -> NoReturn:
    """Report the loss that this thread's last call has returned, and end this process.

    At once and without CUDA's destructors, whatever other threads do: only a new process can use
    the device again.
    """
    loss = Loss()
    library.sing_worker_lost(ctypes.byref(loss))
    message, operation = error(library), (loss.operation or b"").decode(errors="replace")
    where = f" in {operation}" if operation else ""
    print(f"worker: {message}{where}, at position {loss.position}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        send_message(control, DeviceLost(loss.code, message, operation))
    os._exit(EXIT_DEVICE_LOST)


def error(library: ctypes.CDLL) -> str:
    """Return the text of the last error in this thread."""
    text: bytes = library.sing_worker_error() or b"unknown error"
    return text.decode(errors="replace")
