"""A worker: executes the log of one session on one device. Forked by a zygote.

The main thread is in the native library, without the GIL; the control thread takes the agent's
orders. When the agent's connection ends, the worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import traceback
from pathlib import Path

from kernelproxy.errors import ProtocolError, WorkerError
from kernelproxy.protocol import (
    Done,
    End,
    Ended,
    Error,
    Gate,
    Message,
    Open,
    Opened,
    SnapshotTaken,
    TakeSnapshot,
    recv_message,
    send_message,
)

_FD_COUNT = 4  # log, client, worker, agent


def load(path: Path) -> ctypes.CDLL:
    """Load the worker library (`native/worker/api.h`); torch is imported already.

    Raises
    ------
    OSError
        If it does not load.
    """
    library = ctypes.CDLL(str(path))
    c_int, u64 = ctypes.c_int, ctypes.c_uint64
    library.sing_worker_open.argtypes = [
        *[c_int] * 5, ctypes.c_char_p, c_int, u64, ctypes.POINTER(u64), c_int
    ]  # fmt: skip
    library.sing_worker_gate.argtypes = [c_int]
    library.sing_worker_gate.restype = None
    library.sing_worker_end.restype = None
    library.sing_worker_snapshot.argtypes = [ctypes.POINTER(u64), ctypes.POINTER(u64)]
    library.sing_worker_error.restype = ctypes.c_char_p
    return library


def main(control: socket.socket, library: ctypes.CDLL) -> None:
    """Take a session, execute its log until told to end, and report a corrupt one.

    Raises
    ------
    WorkerError
        If executing failed for another reason.
    ProtocolError, OSError
        If the agent does not speak as agreed.
    """
    order, fds = recv_message(control)
    if not isinstance(order, Open) or len(fds) != _FD_COUNT + order.snapshot:
        raise ProtocolError("A worker's first order was not to open a session.")
    snapshot_fd = fds[_FD_COUNT] if order.snapshot else -1
    skip = (ctypes.c_uint64 * len(order.skip))(*order.skip)
    failed = library.sing_worker_open(
        *fds[:_FD_COUNT], snapshot_fd, order.device.encode(), order.threads, order.epoch,
        skip, len(order.skip),
    )  # fmt: skip
    for fd in fds:
        os.close(fd)
    if failed:
        send_message(control, Error(_error(library), "failed"))
        return
    library.sing_worker_gate(int(order.gate))
    send_message(control, Opened())
    orders = threading.Thread(target=_take_orders, args=(control, library), daemon=True)
    orders.start()
    result = library.sing_worker_run()
    if result == 1:
        # Sent beside the control thread's answers: one frame, one write.
        with contextlib.suppress(OSError):
            send_message(control, Ended(_error(library)))
    elif result != 0:
        raise WorkerError(_error(library))  # no fault of the log: another worker may do better


def _take_orders(control: socket.socket, library: ctypes.CDLL) -> None:
    """Take orders until the agent is gone; then nobody needs this process."""
    try:
        while True:
            order, _ = recv_message(control)
            if isinstance(order, End):
                library.sing_worker_end()
                continue
            _obey(control, library, order)
    except OSError:  # also the end of the connection
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _obey(control: socket.socket, library: ctypes.CDLL, order: Message) -> None:
    """Carry out one order and answer it."""
    if isinstance(order, Gate):
        library.sing_worker_gate(int(order.open))
        send_message(control, Done())
    elif isinstance(order, TakeSnapshot):
        position, count = ctypes.c_uint64(), ctypes.c_uint64()
        fd = library.sing_worker_snapshot(ctypes.byref(position), ctypes.byref(count))
        if fd < 0:
            send_message(control, Error(_error(library), "failed"))
            return
        send_message(control, SnapshotTaken(position.value, count.value), [fd])
        os.close(fd)
    else:
        raise ProtocolError(f"A worker was ordered to {type(order).__name__}.")


def _error(library: ctypes.CDLL) -> str:
    text: bytes = library.sing_worker_error() or b"unknown error"
    return text.decode(errors="replace")
