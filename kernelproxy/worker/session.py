"""One session in a worker: it executes its log, and carries out the agent's commands."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from kernelproxy.common.errors import ProtocolError, WorkerError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    EXIT_NO_ROOM,
    Adopt,
    CacheGivenBack,
    Depart,
    Departed,
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
    Preallocate,
    Quiesced,
    Replay,
    RoomMade,
    SnapshotTaken,
    TakeSnapshot,
    Trim,
)
from kernelproxy.worker.library import (
    CALLBACK,
    LOST,
    NO_ROOM,
    Files,
    SkippedRecord,
    WorkerDeparture,
    WorkerSnapshot,
    WorkerStep,
    end_without_device,
    error,
)

#: For so long it waits for other workers to give back memory.
ROOM_SECONDS = 20.0


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
            why = error(library)
            self._send(Error(why, "no-room" if "out of memory" in why else "failed"))
            return
        try:
            self._run(order)
        finally:
            if self._host is not None:  # else the process ends, which is faster
                library.sing_worker_close(self._number)

    def _run(self, order: Open) -> None:
        """Execute the log of the opened session."""
        library = self._library
        library.sing_worker_lease(self._number, 0, 0)
        if not order.prepare:
            library.sing_worker_gate(self._number, int(order.gate))
        send_message(self._control, Opened())
        threading.Thread(target=self._take_orders, daemon=True).start()
        result = library.sing_worker_run(self._number)
        if result == LOST:
            self._end_without_device()
        if result == NO_ROOM:
            print(f"worker: {error(library)}", file=sys.stderr, flush=True)
            os._exit(EXIT_NO_ROOM)
        if result == 1:
            self._send(Ended(error(library)))
        elif result != 0:
            raise WorkerError(error(library))  # not the log's fault: another worker may succeed

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
            give_way = library.sing_worker_drop if order.drop else library.sing_worker_hurry
            give_way(self._number)
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
        elif isinstance(order, Depart) and len(fds) == 1:
            threading.Thread(target=self._depart, args=(fds[0],), daemon=True).start()
        elif isinstance(order, Preallocate):
            threading.Thread(target=self._preallocate, daemon=True).start()
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
        return Error(error(library), "failed") if failed else Done()

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
            self._send(Error(error(self._library), "failed"))
            return
        answer = SnapshotTaken(
            taken.position, taken.bytes, taken.copied, taken.stalled_ns, taken.duration_ns / 1e9
        )
        self._send(answer, [fd])
        os.close(fd)

    def _depart(self, known: int) -> None:
        """Save what it takes along to a process that has the contents in the file `known`."""
        departed = WorkerDeparture()
        failed = self._library.sing_worker_depart(self._number, known, ctypes.byref(departed))
        os.close(known)
        if failed:
            self._send(Error(error(self._library), "failed"))
            return
        files = [departed.tables, departed.contents, departed.carried]
        self._send(Departed(departed.copied, departed.omitted), files)
        for each in files:
            os.close(each)

    def _preallocate(self) -> None:
        """Take the memory for the next snapshot, or the next move."""
        failed = self._library.sing_worker_preallocate(self._number)
        self._send(Error(error(self._library), "failed") if failed else Done())

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
        kept = ctypes.c_uint64()
        failed = self._library.sing_worker_give_back_cache(self._number, ctypes.byref(kept))
        if failed == LOST:
            self._end_without_device()
        if failed:
            print(f"the cache could not be given back: {error(self._library)}", file=sys.stderr)
        self._send(CacheGivenBack(kept.value))

    def _observe(self, order: Observe) -> Observed:
        """Return the step that the recent log has repeated."""
        step = WorkerStep()
        if self._library.sing_worker_observe(self._number, order.since_ns, ctypes.byref(step)):
            raise WorkerError(error(self._library))
        return Observed(
            step.records, step.nadir, step.memory_min, step.memory_max, step.made, step.ns / 1e9
        )

    def _end_without_device(self) -> NoReturn:
        end_without_device(self._control, self._library)


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
