"""Worker: executes the log of one session on one device. Forked by a zygote.

The main thread runs the native library, without the GIL; the control thread receives the agent's
commands. When the agent's connection ends, the worker ends.

A seat executes the sessions of several ranks of a job, each with its own connection and threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from kernelproxy.common.errors import ProtocolError, WorkerError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    EXIT_DEVICE_LOST,
    EXIT_NO_ROOM,
    Adopt,
    CacheGivenBack,
    DeviceLost,
    Done,
    End,
    Ended,
    Error,
    Frozen,
    Gate,
    GiveBackCache,
    Host,
    Hurry,
    Lease,
    Message,
    NeedRoom,
    Observe,
    Observed,
    Open,
    Opened,
    Quiesced,
    Replay,
    RoomMade,
    SnapshotTaken,
    TakeSnapshot,
    Trim,
    Warm,
)
from kernelproxy.worker import process_title

CALLBACK = ctypes.CFUNCTYPE(None)
#: `SING_WORKER_LOST` and `SING_WORKER_NO_ROOM`
LOST, NO_ROOM = -2, -3
#: For so long it waits for other workers to give back memory.
ROOM_SECONDS = 20.0


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


class SeatCounts(ctypes.Structure):
    """`sing_worker_seat_counts`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "switches", "switch_ns", "executed", "squashed", "recomputed", "bytes_shared",
        )
    ]  # fmt: skip


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
    library.sing_worker_warm.argtypes = [ctypes.c_char_p]
    library.sing_worker_open.argtypes = [
        ctypes.POINTER(Files), ctypes.c_char_p, c_int, u64,
        ctypes.POINTER(SkippedRecord), c_int, u64, c_int,
    ]  # fmt: skip
    library.sing_worker_gate.argtypes = [c_int, c_int]
    library.sing_worker_lease.argtypes = [c_int, u64, c_int]
    library.sing_worker_take_lease.argtypes = [c_int, u64, u64]
    library.sing_worker_observe.argtypes = [c_int, u64, ctypes.POINTER(WorkerStep)]
    library.sing_worker_close.restype = None
    library.sing_worker_end_seat.restype = None
    library.sing_worker_seat_figures.argtypes = [ctypes.POINTER(SeatCounts)]
    library.sing_worker_seat_figures.restype = None
    library.sing_worker_end.restype = None
    library.sing_worker_hurry.restype = None
    library.sing_worker_snapshot.argtypes = [c_int, c_int, CALLBACK, ctypes.POINTER(WorkerSnapshot)]
    library.sing_worker_on_no_room.argtypes = [CALLBACK]
    library.sing_worker_on_no_room.restype = None
    library.sing_worker_adopt.argtypes = [c_int, c_int]
    library.sing_worker_replay.argtypes = [c_int, u64]
    library.sing_worker_lost.argtypes = [ctypes.POINTER(Loss)]
    library.sing_worker_lost.restype = None
    library.sing_worker_error.restype = ctypes.c_char_p
    return library


def main(control: socket.socket, library: ctypes.CDLL) -> None:
    """Open a session, execute its log until the end is requested, and report a corrupt log.

    In a seat, also those sessions that join it.

    Raises
    ------
    WorkerError
        If execution failed for another reason.
    ProtocolError, OSError
        If the agent violates the protocol.
    """
    order, fds = recv_message(control)
    if isinstance(order, Warm):
        _warm(control, library, order)
        try:
            order, fds = recv_message(control)
        except ConnectionError:  # no session has needed it
            return
    opening = _checked(order)
    _show_title(opening.title)
    _show_device(opening.visible)
    if opening.seat:
        Seat(library, opening.threads).serve(control, opening, fds)
    else:
        WorkerSession(control, library).execute(opening, fds)


def _checked(order: Message) -> Open:
    if not isinstance(order, Open):
        raise ProtocolError("A worker's first order was not to open a session.")
    return order


class Seat:
    """The sessions of this process, if it executes several: see Note [Seats] in `seat.h`.

    Parameters
    ----------
    library : ctypes.CDLL
    threads : int
        Compute threads of the device.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library, self._threads = library, threads
        self._changing, self._count, self._sessions = threading.Lock(), 0, 0
        if library.sing_worker_seat(threads):
            raise WorkerError(_error(library))

    def serve(self, control: socket.socket, order: Open, fds: list[int]) -> None:
        """Execute a session and those that join it, until the last one has ended."""
        self._begin(control, (order, fds))
        if self._library.sing_worker_serve(self._threads):
            raise WorkerError(_error(self._library))
        self._report()

    def _report(self) -> None:
        """Log what sharing the process has saved."""
        counts = SeatCounts()
        self._library.sing_worker_seat_figures(ctypes.byref(counts))
        microseconds = counts.switch_ns / 1e3 / max(1, counts.switches)
        print(
            f"worker: {self._sessions} sessions, {counts.switches} switches of "
            f"{microseconds:.0f} us, {counts.executed} calls executed, {counts.squashed} not "
            f"(and {counts.recomputed} of those later)",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def host(self, control: socket.socket) -> None:
        """Serve one more session, of which the first order is still to come."""
        self._begin(control, None)

    def _begin(self, control: socket.socket, first: tuple[Open, list[int]] | None) -> None:
        with self._changing:
            self._count += 1
            self._sessions += 1
        given = (control, first)
        threading.Thread(target=self._execute, args=given, name="session", daemon=True).start()

    def _execute(self, control: socket.socket, first: tuple[Open, list[int]] | None) -> None:
        try:
            order, fds = first or recv_message(control)
            WorkerSession(control, self._library, self.host).execute(_checked(order), fds)
        except OSError:  # also the end of the connection: only this session ends
            pass
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        with self._changing:
            self._count -= 1
            is_last = self._count == 0
        if is_last:  # the connection ends with the process
            self._library.sing_worker_end_seat()
            return
        # Its end says that the memory is free; another thread may still wait for orders.
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)
        control.close()


class WorkerSession:
    """One session of this process.

    Parameters
    ----------
    control : socket
        Connection to the agent.
    library : ctypes.CDLL
    host : callable, optional
        Serves one more session over a connection; without it, the process ends with this one.
    """

    def __init__(
        self,
        control: socket.socket,
        library: ctypes.CDLL,
        host: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._control, self._library, self._host = control, library, host
        self._room = RoomRequest(control)
        self._number = -1

    def execute(self, order: Open, fds: list[int]) -> None:
        """Execute its log until the end is requested; raises as `main`."""
        library = self._library
        records = zip(order.skip, order.why, strict=True)
        skip = (SkippedRecord * len(order.skip))(
            *(SkippedRecord(at, why.encode(), at in order.starved) for at, why in records)
        )
        ask_for_room = CALLBACK(self._room.ask)
        library.sing_worker_on_no_room(ask_for_room)
        self._number = library.sing_worker_open(
            Files.of(order, fds), order.device.encode(), order.threads, order.epoch,
            skip, len(skip), order.careful_until, int(order.prepare),
        )  # fmt: skip
        for fd in fds:
            os.close(fd)
        if self._number < 0:
            why = _error(library)
            self._send(Error(why, "no-room" if "out of memory" in why else "failed"))
            return
        library.sing_worker_lease(self._number, 0, 0)
        if not order.prepare:
            library.sing_worker_gate(self._number, int(order.gate))
        send_message(self._control, Opened())
        threading.Thread(target=self._take_orders, daemon=True).start()
        result = library.sing_worker_run(self._number)
        if result == LOST:
            self._end_without_device()
        if result == NO_ROOM:
            print(f"worker: {_error(library)}", file=sys.stderr, flush=True)
            os._exit(EXIT_NO_ROOM)
        if result == 1:
            self._send(Ended(_error(library)))
        elif result != 0:
            raise WorkerError(_error(library))  # not the log's fault: another worker may succeed
        if self._host is not None:
            library.sing_worker_close(self._number)

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; without the agent, its connection ends, which the control thread notices.

        Concurrent with other threads: each frame is one write.
        """
        with contextlib.suppress(OSError):
            send_message(self._control, message, list(fds))

    def _take_orders(self) -> None:
        """Carry out commands until the agent disconnects; then end the session, or the process."""
        try:
            while True:
                self._take_order(*recv_message(self._control))
        except OSError:  # also the end of the connection
            if self._host is None:
                os._exit(0)
            self._library.sing_worker_end(self._number)
        except BaseException:
            traceback.print_exc()
            os._exit(70)

    def _take_order(self, order: Message, fds: list[int]) -> None:
        library = self._library
        if isinstance(order, End):
            library.sing_worker_end(self._number)
        elif isinstance(order, Hurry):
            library.sing_worker_hurry(self._number)
        elif isinstance(order, Lease):
            self._set_lease(order)
        elif isinstance(order, RoomMade):
            self._room.made.set()
        elif isinstance(order, Observe):
            send_message(self._control, self._observe(order))
        elif isinstance(order, Host) and len(fds) == 1 and self._host is not None:
            self._host(socket.socket(fileno=fds[0]))
        elif isinstance(order, GiveBackCache):
            # As below: it waits for the work of the device.
            threading.Thread(target=self._give_back, daemon=True).start()
        elif isinstance(order, TakeSnapshot):
            # In another thread, so that this one continues to receive commands.
            threading.Thread(target=self._take_snapshot, args=(order,), daemon=True).start()
        else:
            send_message(self._control, self._obey(order, fds))
            for fd in fds:
                os.close(fd)

    def _obey(self, order: Message, fds: list[int]) -> Message:
        """Carry out one command; return the reply."""
        library = self._library
        if isinstance(order, Gate):
            failed = library.sing_worker_gate(self._number, int(order.open))
        elif isinstance(order, Replay):
            failed = library.sing_worker_replay(self._number, order.until)
        elif isinstance(order, Trim):
            failed = library.sing_worker_trim(self._number)
        elif isinstance(order, Adopt) and len(fds) == 1:
            failed = library.sing_worker_adopt(self._number, fds[0])
        else:
            raise ProtocolError(f"A worker was ordered to {type(order).__name__}.")
        if failed == LOST:
            self._end_without_device()
        return Error(_error(library), "failed") if failed else Done()

    def _take_snapshot(self, order: TakeSnapshot) -> None:
        """Take a snapshot and send it."""
        taken = WorkerSnapshot()
        manner = 0 if order.stop else 2 if order.patient else 1  # as in `api.h`
        frozen = CALLBACK(lambda: self._send(Frozen())) if order.tell else CALLBACK()
        fd = self._library.sing_worker_snapshot(self._number, manner, frozen, ctypes.byref(taken))
        if fd == LOST:
            self._end_without_device()
        # Without the agent the snapshot is useless, and the control thread ends the session.
        if fd < 0:
            self._send(Error(_error(self._library), "failed"))
            return
        answer = SnapshotTaken(
            taken.position, taken.bytes, taken.copied, taken.stalled_ns, taken.duration_ns / 1e9
        )
        self._send(answer, [fd])
        os.close(fd)

    def _set_lease(self, order: Lease) -> None:
        """Grant or revoke the lease. A revocation that may wait runs in another thread."""
        if order.given or order.within <= 0:
            self._library.sing_worker_lease(self._number, order.token, int(order.given))
        if not order.given:
            threading.Thread(target=self._report_parked, args=(order,), daemon=True).start()

    def _report_parked(self, order: Lease) -> None:
        """Report that execution has stopped; if it continues, a later lease was granted."""
        library = self._library
        if order.within > 0:
            library.sing_worker_take_lease(self._number, order.token, int(order.within * 1e9))
        if library.sing_worker_await_parked(self._number) == LOST:
            self._end_without_device()
        self._send(Quiesced(order.token))

    def _give_back(self) -> None:
        """Give back the device memory that is kept for the next tensors, as far as possible."""
        failed = self._library.sing_worker_give_back_cache(self._number)
        if failed == LOST:
            self._end_without_device()
        if failed:
            print(f"the cache could not be given back: {_error(self._library)}", file=sys.stderr)
        self._send(CacheGivenBack())

    def _observe(self, order: Observe) -> Observed:
        """Return the step that the recent log has repeated."""
        step = WorkerStep()
        if self._library.sing_worker_observe(self._number, order.since_ns, ctypes.byref(step)):
            raise WorkerError(_error(self._library))
        return Observed(
            step.records, step.nadir, step.memory_min, step.memory_max, step.made, step.ns / 1e9
        )

    def _end_without_device(self) -> NoReturn:
        _end_without_device(self._control, self._library)


class RoomRequest:
    """Asks the agent to make other workers give back device memory.

    Parameters
    ----------
    control : socket
    """

    def __init__(self, control: socket.socket) -> None:
        self.made = threading.Event()
        self._control = control

    def ask(self) -> None:
        """Ask, and wait for the answer for a time."""
        self.made.clear()
        with contextlib.suppress(OSError):  # without the agent this process ends
            send_message(self._control, NeedRoom())
            self.made.wait(ROOM_SECONDS)


def _show_title(title: str) -> None:
    with contextlib.suppress(OSError):  # the title is only informative
        process_title.show(title)


def _warm(control: socket.socket, library: ctypes.CDLL, order: Warm) -> None:
    """Make a context, and report it."""
    _show_title(order.title)
    _show_device(order.visible)
    failed = library.sing_worker_warm(order.device.encode())
    if failed == LOST:
        _end_without_device(control, library)
    send_message(control, Error(_error(library), "failed") if failed else Done())


def _show_device(uuid: str) -> None:
    """Hide all GPUs but one: libraries that choose one themselves would take memory of another."""
    if uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid


def _end_without_device(control: socket.socket, library: ctypes.CDLL) -> NoReturn:
    """Report the loss that this thread's last call has returned, and end this process.

    At once and without CUDA's destructors, whatever other threads do: only a new process can use
    the device again.
    """
    loss = Loss()
    library.sing_worker_lost(ctypes.byref(loss))
    message, operation = _error(library), (loss.operation or b"").decode(errors="replace")
    where = f" in {operation}" if operation else ""
    print(f"worker: {message}{where}, at position {loss.position}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        send_message(control, DeviceLost(loss.code, message, operation))
    os._exit(EXIT_DEVICE_LOST)


def _error(library: ctypes.CDLL) -> str:
    text: bytes = library.sing_worker_error() or b"unknown error"
    return text.decode(errors="replace")
