"""Zygote: imports torch once, then forks workers. ``python -m kernelproxy.worker.zygote FD``.

Runs under the interpreter of a kernel's environment, of which it uses only the standard library and
torch. It never runs a parallel region and never opens a device: neither survives a fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from kernelproxy.common.errors import NativeError, ProtocolError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Compiled, Error, Spawn, Spawned, WorkerExited, ZygoteReady
from kernelproxy.worker import graph_ops, op_imports
from kernelproxy.worker import main as worker
from kernelproxy.worker.library import load

#: Main function of a worker in the forked child; its argument is the control socket.
WorkerMain = Callable[[socket.socket], None]


def main(fd: int) -> int:
    """Prepare, report readiness or the error, and fork until the agent closes the connection."""
    with socket.socket(fileno=fd) as agent:
        try:
            ready, library = prepare(agent)
        except (NativeError, ImportError, OSError) as error:
            send_message(agent, Error(f"{sys.executable}: {error}", "unavailable"))
            return 1
        serve(agent, ready, lambda control: worker.main(control, library))
    return 0


def prepare(agent: socket.socket) -> tuple[ZygoteReady, ctypes.CDLL]:
    """Import torch and load the worker library that belongs to it.

    Parameters
    ----------
    agent : socket
        Connection to the agent; receives the progress, if the library has to be compiled.

    Raises
    ------
    NativeError
        If the library cannot be found or compiled.
    ImportError, OSError
        If torch or the library cannot be loaded.
    """
    from kernelproxy.native import build, libraries

    info = build.describe()

    def report(compiling: libraries.Compiling) -> None:
        send_message(agent, Compiled(info.short, compiling.done, compiling.total))

    parts = build.ensure(info, report)
    import torch

    library = load(parts.worker)
    graph_ops.register()
    op_imports.register()
    directory = str(Path(torch.__file__).parent)
    return ZygoteReady(str(torch.__version__), directory, str(parts.worker)), library


def serve(agent: socket.socket, ready: ZygoteReady, worker_main: WorkerMain) -> None:
    """Carry out commands to fork, and report the ends of workers."""
    _set_name("sing-zygote")
    gc.collect()
    gc.freeze()  # otherwise, a collection in a worker would copy every shared page
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    send_message(agent, ready)
    with selectors.DefaultSelector() as selector:
        selector.register(agent, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == ended:
                    os.read(ended, 4096)
                    reap(agent)
                elif not fork(agent, worker_main):
                    return


def fork(agent: socket.socket, worker_main: WorkerMain) -> bool:
    """Receive one command and fork a worker; return False at the end of the connection."""
    try:
        order, fds = recv_message(agent)
    except ConnectionError:
        return False
    if not isinstance(order, Spawn) or len(fds) != 1:
        raise ProtocolError("A zygote was asked for something else than a worker.")
    control = socket.socket(fileno=fds[0])
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        send_message(agent, Error(f"A worker could not be forked: {error}.", "failed"))
        control.close()
        return True
    if pid == 0:
        run_child(control, parent, worker_main)
    control.close()
    pidfd = os.pidfd_open(pid)  # not reaped yet, so the number is still its own
    send_message(agent, Spawned(order.token, pid), [pidfd])
    os.close(pidfd)
    return True


def run_child(control: socket.socket, parent: int, worker_main: WorkerMain) -> None:
    """Become a worker: never returns."""
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _set_name("sing-worker")
        # The end of the control connection is the first sign that the agent has died. If no thread
        # reads it, the zygote ends, too, and this process with it.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            keep = control.fileno()
            os.closerange(3, keep)
            os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
            worker_main(control)
            status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def reap(agent: socket.socket) -> None:
    """Report every worker that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        send_message(agent, WorkerExited(pid, os.waitstatus_to_exitcode(status)))


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _set_name(name: str) -> None:
    """Set the name of this process in `ps` and `top`."""
    _prctl(_PR_SET_NAME, name.encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
