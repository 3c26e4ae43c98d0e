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

from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Done, Error, Warm
from kernelproxy.worker import process_title
from kernelproxy.worker.library import LOST, end_without_device, error
from kernelproxy.worker.seat import SeatServer, checked
from kernelproxy.worker.session import WorkerSession


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
    opening = checked(order)
    _show_title(opening.title)
    _show_device(opening.visible)
    if opening.seat:
        seat = SeatServer(library, opening.threads, opening.seat)
        seat.serve(control, opening, fds)
    else:
        WorkerSession(control, library).execute(opening, fds)


def _show_title(title: str) -> None:
    with contextlib.suppress(OSError):  # the title is only informative
        process_title.show(title)


def _warm(control: socket.socket, library: ctypes.CDLL, order: Warm) -> None:
    """Make a context, and report it."""
    _show_title(order.title)
    _show_device(order.visible)
    failed = library.sing_worker_warm(order.device.encode())
    if failed == LOST:
        end_without_device(control, library)
    send_message(control, Error(error(library), "failed") if failed else Done())


def _show_device(uuid: str) -> None:
    """Hide all GPUs but one: libraries that choose one themselves would take memory of another."""
    if uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
