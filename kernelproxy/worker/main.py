"""Worker: executes the log of one session on one device. Forked by a zygote.

The main thread runs the native library, without the GIL; the control thread receives the agent's
commands. When the agent's connection ends, the worker ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import traceback
from pathlib import Path

from kernelproxy.common.errors import ProtocolError, WorkerError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    Adopt,
    Done,
    End,
    Ended,
    Error,
    Frozen,
    Gate,
    Hurry,
    Lease,
    Message,
    Observe,
    Observed,
    Open,
    Opened,
    Quiesced,
    Replay,
    SnapshotTaken,
    TakeSnapshot,
    Trim,
)
from kernelproxy.worker import process_title

FROZEN = ctypes.CFUNCTYPE(None)


class Files(ctypes.Structure):
    """`sing_worker_files`."""

    _names = ("log", "client", "worker", "agent", "arena")
    _fields_ = [(name, ctypes.c_int) for name in (*_names, "snapshot", "readiness")]

    @classmethod
    def of(cls, order: Open, fds: list[int]) -> Files:
        """Return the descriptors that came with a command, by name.

        Raises
        ------
        ProtocolError
            If their number does not match the command.
        """
        names = list(cls._names)
        names += ["snapshot"] * order.snapshot + ["readiness"] * order.readiness
        if len(fds) != len(names):
            raise ProtocolError("A worker's first order came with other descriptors than it says.")
        return cls(**{"snapshot": -1, "readiness": -1, **dict(zip(names, fds, strict=True))})


class WorkerSnapshot(ctypes.Structure):
    """`sing_worker_taken`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("position", "bytes", "copied", "stalled_ns", "duration_ns")
    ]


class WorkerStep(ctypes.Structure):
    """`sing_worker_step`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("records", "nadir", "memory_min", "memory_max", "made", "ns")
    ]


def load(path: Path) -> ctypes.CDLL:
    """Load the worker library (`native/worker/loop/api.h`); torch must be imported already.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """
    library = ctypes.CDLL(str(path))
    c_int, u64 = ctypes.c_int, ctypes.c_uint64
    library.sing_worker_open.argtypes = [
        ctypes.POINTER(Files), ctypes.c_char_p, c_int, u64, ctypes.POINTER(u64), c_int, c_int, c_int
    ]  # fmt: skip
    library.sing_worker_gate.argtypes = [c_int]
    library.sing_worker_lease.argtypes = [u64, c_int]
    library.sing_worker_take_lease.argtypes = [u64, u64]
    library.sing_worker_observe.argtypes = [u64, ctypes.POINTER(WorkerStep)]
    library.sing_worker_end.restype = None
    library.sing_worker_hurry.restype = None
    library.sing_worker_snapshot.argtypes = [c_int, FROZEN, ctypes.POINTER(WorkerSnapshot)]
    library.sing_worker_adopt.argtypes = [c_int]
    library.sing_worker_replay.argtypes = [u64]
    library.sing_worker_error.restype = ctypes.c_char_p
    return library


def main(control: socket.socket, library: ctypes.CDLL) -> None:
    """Open a session, execute its log until the end is requested, and report a corrupt log.

    Raises
    ------
    WorkerError
        If execution failed for another reason.
    ProtocolError, OSError
        If the agent violates the protocol.
    """
    order, fds = recv_message(control)
    if not isinstance(order, Open):
        raise ProtocolError("A worker's first order was not to open a session.")
    with contextlib.suppress(OSError):  # the title is only informative
        process_title.show(order.title)
    skipped = [*order.starved, *(each for each in order.skip if each not in order.starved)]
    skip = (ctypes.c_uint64 * len(skipped))(*skipped)
    if order.visible:
        # Otherwise libraries that choose a GPU themselves would take memory of the first one.
        os.environ["CUDA_VISIBLE_DEVICES"] = order.visible
    if order.careful:
        # CUDA reads it at its initialisation, which happens in `sing_worker_open`.
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    failed = library.sing_worker_open(
        Files.of(order, fds), order.device.encode(), order.threads, order.epoch,
        skip, len(skipped), len(order.starved), int(order.prepare),
    )  # fmt: skip
    for fd in fds:
        os.close(fd)
    if failed:
        send_message(control, Error(_error(library), "failed"))
        return
    library.sing_worker_lease(0, 0)
    if not order.prepare:
        library.sing_worker_gate(int(order.gate))
    send_message(control, Opened())
    orders = threading.Thread(target=_take_orders, args=(control, library), daemon=True)
    orders.start()
    result = library.sing_worker_run()
    if result == 1:
        # Concurrent with the control thread's replies: each frame is one write.
        with contextlib.suppress(OSError):
            send_message(control, Ended(_error(library)))
    elif result != 0:
        raise WorkerError(_error(library))  # not the log's fault: another worker may succeed


def _take_orders(control: socket.socket, library: ctypes.CDLL) -> None:
    """Carry out commands until the agent disconnects; then end this process."""
    try:
        while True:
            order, fds = recv_message(control)
            if isinstance(order, End):
                library.sing_worker_end()
            elif isinstance(order, Hurry):
                library.sing_worker_hurry()
            elif isinstance(order, Lease):
                _set_lease(control, library, order)
            elif isinstance(order, Observe):
                send_message(control, _observe(library, order))
            elif isinstance(order, TakeSnapshot):
                # In another thread, so that this one continues to receive commands.
                arguments = (control, library, order)
                threading.Thread(target=_take_snapshot, args=arguments, daemon=True).start()
            else:
                send_message(control, _obey(library, order, fds))
                for fd in fds:
                    os.close(fd)
    except OSError:  # also the end of the connection
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def _obey(library: ctypes.CDLL, order: Message, fds: list[int]) -> Message:
    """Carry out one command; return the reply."""
    if isinstance(order, Gate):
        failed = library.sing_worker_gate(int(order.open))
    elif isinstance(order, Replay):
        failed = library.sing_worker_replay(order.until)
    elif isinstance(order, Trim):
        failed = library.sing_worker_trim()
    elif isinstance(order, Adopt) and len(fds) == 1:
        failed = library.sing_worker_adopt(fds[0])
    else:
        raise ProtocolError(f"A worker was ordered to {type(order).__name__}.")
    return Error(_error(library), "failed") if failed else Done()


def _take_snapshot(control: socket.socket, library: ctypes.CDLL, order: TakeSnapshot) -> None:
    """Take a snapshot and send it."""
    taken = WorkerSnapshot()
    manner = 0 if order.stop else 2 if order.patient else 1  # as in `api.h`

    def report_frozen() -> None:
        with contextlib.suppress(OSError):
            send_message(control, Frozen())

    frozen = FROZEN(report_frozen) if order.tell else FROZEN()
    fd = library.sing_worker_snapshot(manner, frozen, ctypes.byref(taken))
    # Without the agent the snapshot is useless, and the control thread ends the process.
    with contextlib.suppress(OSError):
        if fd < 0:
            send_message(control, Error(_error(library), "failed"))
            return
        answer = SnapshotTaken(
            taken.position, taken.bytes, taken.copied, taken.stalled_ns, taken.duration_ns / 1e9
        )
        send_message(control, answer, [fd])
        os.close(fd)


def _set_lease(control: socket.socket, library: ctypes.CDLL, order: Lease) -> None:
    """Grant or revoke the lease. A revocation that may wait runs in another thread."""
    if order.given or order.within <= 0:
        library.sing_worker_lease(order.token, int(order.given))
    if not order.given:
        given = (control, library, order)
        threading.Thread(target=_report_parked, args=given, daemon=True).start()


def _report_parked(control: socket.socket, library: ctypes.CDLL, order: Lease) -> None:
    """Report that execution has stopped; if it continues, a later lease was granted."""
    if order.within > 0:
        library.sing_worker_take_lease(order.token, int(order.within * 1e9))
    library.sing_worker_await_parked()
    with contextlib.suppress(OSError):
        send_message(control, Quiesced(order.token))


def _observe(library: ctypes.CDLL, order: Observe) -> Observed:
    """Return the step that the recent log has repeated."""
    step = WorkerStep()
    if library.sing_worker_observe(order.since_ns, ctypes.byref(step)):
        raise WorkerError(_error(library))
    return Observed(
        step.records, step.nadir, step.memory_min, step.memory_max, step.made, step.ns / 1e9
    )


def _error(library: ctypes.CDLL) -> str:
    text: bytes = library.sing_worker_error() or b"unknown error"
    return text.decode(errors="replace")
