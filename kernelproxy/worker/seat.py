"""A worker that executes several sessions: those of the ranks of a job on one device."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import sys
import threading
import traceback

from kernelproxy.common.errors import ProtocolError, WorkerError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import ContentsListed, End, ListContents, Message, Open
from kernelproxy.worker.library import SeatCounts, error
from kernelproxy.worker.session import WorkerSession


def checked(order: Message) -> Open:
    """Return the first order of a session; raises ProtocolError if it is another one."""
    if not isinstance(order, Open):
        raise ProtocolError("A worker's first order was not to open a session.")
    return order


class SeatServer:
    """The sessions of this process, if it executes several: see Note [Turns] in `seat.h`.

    Parameters
    ----------
    library : ctypes.CDLL
    threads : int
        Compute threads of the device.
    secret : str
        Of the job, from which the keys of content ids are derived: see Note [Moves] in `moved.h`.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, secret: str) -> None:
        self._library, self._threads = library, threads
        self._changing, self._count, self._sessions = threading.Lock(), 0, 0
        #: Connection of the session that has ended last: it ends with the process.
        self.last: socket.socket | None = None
        key = hashlib.shake_256(secret.encode()).digest(library.sing_worker_key_bytes())
        if library.sing_worker_seat(threads, key, len(key)):
            raise WorkerError(error(library))

    def serve(self, control: socket.socket, order: Open, fds: list[int]) -> None:
        """Execute a session and those that join it, until the last one has ended."""
        self._begin(control, (order, fds))
        if self._library.sing_worker_serve(self._threads):
            raise WorkerError(error(self._library))

    def _report(self) -> None:
        """Log what sharing the process has saved until now."""
        counts = SeatCounts()
        self._library.sing_worker_seat_figures(ctypes.byref(counts))
        microseconds = counts.switch_ns / 1e3 / max(1, counts.switches)
        print(
            f"worker: {self._sessions} sessions, {counts.switches} switches of "
            f"{microseconds:.0f} us, {counts.executed} calls executed, {counts.squashed} not "
            f"(and {counts.recomputed} of those later), "
            f"{counts.held_max / 2**20:.0f} MiB held at most",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _list_contents(self, control: socket.socket) -> None:
        found = self._library.sing_worker_list_contents()
        if found < 0:
            raise WorkerError(error(self._library))
        try:
            send_message(control, ContentsListed(), [found])
        finally:
            os.close(found)

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
            if isinstance(order, ListContents):
                self._list_contents(control)
                order, fds = recv_message(control)
            if not isinstance(order, End):  # it is given up before it has a session
                WorkerSession(control, self._library, self.host).execute(checked(order), fds)
        except OSError:  # also the end of the connection: only this session ends
            pass
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        self._report()
        with self._changing:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self.last = control
            self._library.sing_worker_end_seat()
            return
        # Its end says that the memory is free; another thread may still wait for orders.
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)
        control.close()
