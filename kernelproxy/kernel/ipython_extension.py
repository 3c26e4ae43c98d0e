"""IPython extension that the provisioner loads into kernels, by ``--ext``.

It must never prevent the start of a kernel, so nothing in it may raise. Needs the standard library
and IPython only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from functools import partial
from typing import Any

from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import Carried, KernelRequest
from kernelproxy.common.untrusted import parse_json
from kernelproxy.kernel import activation, restored_process

_counter: CellCounter | None = None
_DELIMITER = b"<IDS|MSG>"


class CellCounter:
    """Notifies the agent when cells begin and end.

    IPython's events do not come strictly in pairs: ``post_run_cell`` also comes for cells that were
    refused before they ran (blank ones), and an interrupted cell gets a new result object. So begun
    cells are kept on a stack for each thread (subshells run cells in threads of their own, and a
    cell may run another one). The end of a cell is matched by the cell's text.
    """

    def __init__(self) -> None:
        self._started = threading.local()

    def pre_run_cell(self, info: Any) -> None:
        """Called by IPython before a cell runs."""
        self._stack().append(info.raw_cell)
        activation.cell(1)

    def post_run_cell(self, result: Any) -> None:
        """Called by IPython after a cell ran, failed or was interrupted."""
        stack = self._stack()
        text = result.info.raw_cell if result.info is not None else None
        if text not in stack:
            return
        while stack:
            activation.cell(-1)
            if stack.pop() == text:
                return

    def _stack(self) -> list[Any]:
        if not hasattr(self._started, "stack"):
            self._started.stack = []
        stack: list[Any] = self._started.stack
        return stack


class KernelRequests:
    """Carries out the daemon's requests, between two cells.

    Parameters
    ----------
    shell : InteractiveShell
        Shell of a kernel.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._waiting: list[KernelRequest] = []
        self._lock = threading.Lock()  # guards the queue

    def __call__(self, request: KernelRequest) -> None:
        """Queue a request, or withdraw it; called in a thread of ours."""
        key = request.verb, request.name
        with self._lock:
            self._waiting = [each for each in self._waiting if (each.verb, each.name) != key]
            if request.withdrawn:
                return
            self._waiting.append(request)
        _prepare()
        self._shell.kernel.io_loop.add_callback(self._carry_out)

    def _next(self) -> KernelRequest | None:
        """Take a request, unless a cell runs (one may be awaiting something)."""
        with self._lock:
            return (
                self._waiting.pop(0) if self._waiting and not activation.current().cells else None
            )

    def post_run_cell(self, _: Any) -> None:
        """Called by IPython after a cell."""
        if self._waiting:
            self._shell.kernel.io_loop.add_callback(self._carry_out)

    def _carry_out(self) -> None:
        """Carry out the queued requests."""
        while (request := self._next()) is not None:
            session = activation.current().session
            try:
                from kernelproxy.kernel import checkpoint_client  # with cloudpickle: only at need
            except ImportError as error:
                with connect(start=False) as control:
                    control.call(
                        Carried(session, request.verb, request.name, f"It lacks {error.name}.")
                    )
                continue
            checkpoint_client.carry_out(request, self._shell, session)


def receive_requests(kernel: Any) -> None:
    """Notice when a cell is requested while another one runs.

    ipykernel 7 reads requests in a thread; older versions read none while a cell runs.
    """
    take = getattr(kernel, "shell_channel_thread_main", None)
    if take is None:
        return

    async def receive(message: Any) -> Any:
        if activation.current().cells and _asks_for_cell(message):
            activation.cell_asked()
        return await take(message)

    kernel.shell_channel_thread_main = receive


def _asks_for_cell(message: Any) -> bool:
    """True if a Jupyter message, as frames, is a request to run a cell."""
    frames = [bytes(each) for each in message]
    try:
        header = parse_json(frames[frames.index(_DELIMITER) + 2])
        return bool(header["msg_type"] == "execute_request")
    except (ValueError, IndexError, KeyError, TypeError):  # the kernel reports the error
        return False


def _prepare() -> None:
    """Import what carries out requests, in a thread, so that the notebook need not wait."""
    with contextlib.suppress(Exception):  # carrying out reports the error
        from kernelproxy.kernel import checkpoint_client  # noqa: F401
        from kernelproxy.kernel.files import changed_files

        changed_files.collect(())  # compiles its patterns


def load_ipython_extension(ip: Any) -> None:
    """Called by IPython when the kernel starts, before any cell."""
    global _counter
    try:
        activation.activate()
        if activation.current().session and _counter is None:
            _counter = CellCounter()
            ip.events.register("pre_run_cell", _counter.pre_run_cell)
            ip.events.register("post_run_cell", _counter.post_run_cell)
            if hasattr(ip, "kernel"):
                requests = KernelRequests(ip)
                activation.state.on_request = requests
                activation.state.on_restored = restored_process.Revival(ip)
                detach.current.obstacle = partial(restored_process.obstacle, ip.kernel)
                activation.listen()
                ip.events.register("post_run_cell", requests.post_run_cell)
                receive_requests(ip.kernel)
    except Exception as error:
        print(f"jupyter_sing: CPU only: {type(error).__name__}: {error}.", file=sys.stderr)
    for name in filter(None, os.environ.get("SING_EXTENSIONS", "").split(",")):
        try:
            importlib.import_module(name).load_ipython_extension(ip)
        except Exception as error:
            print(f"jupyter_sing: {name} is not available: {error}.", file=sys.stderr)
