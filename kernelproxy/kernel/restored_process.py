"""What a kernel does when a process of a checkpoint runs in its place, and what that does first.

Standard library only, and what IPython and ipykernel hand over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelproxy.common.untrusted import parse_json
from kernelproxy.kernel.files import tracker

if TYPE_CHECKING:
    from kernelproxy.kernel.activation.state import Woken

_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


class Restored(BaseException):
    """Ends what made a checkpoint in a process that was restored from it, not the one that made it.

    It is shown as one line in place of a traceback. No handler of `Exception` may take it for a
    failure, and go on with what has been done already, by another process.

    Parameters
    ----------
    name : str
        Of the checkpoint.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"Restored {name!r} (its process)." if name else "Restored (its process).")

    def _render_traceback_(self) -> list[str]:
        """Called by IPython."""
        return [str(self)]


def obstacle(kernel: Any) -> str:
    """Why a kernel could not be saved and restored; "" if it can.

    A debugger talks to the kernel over a connection that is closed then, and the thread that reads
    the control channel waits for it for ever.
    """
    used = getattr(getattr(kernel, "debugger", None), "debugpy_initialized", False)
    return "The debugger was used, and its connection cannot be saved." if used else ""


class Revival:
    """Makes a restored process the kernel in whose place it is; see `activation.state.on_restored`.

    Parameters
    ----------
    shell : InteractiveShell
        Of a kernel.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, woken: Woken) -> None:
        """Called in a thread of ours, before anything is asked of this process."""
        app = self._shell.kernel.parent
        for name in _PORTS:
            setattr(app, name, woken.ports.get(getattr(app, name), getattr(app, name)))
        if woken.connection_file:
            # It may not be the only one that goes on from where that one was.
            self._adopt(app, Path(woken.connection_file))
            begin_history(self._shell.history_manager)
        journal = woken.environment.get(tracker.JOURNAL_VARIABLE)
        os.environ.update(woken.environment)
        if journal:
            tracker.follow(Path(journal))

    def _adopt(self, app: Any, connection_file: Path) -> None:
        """Be known under the name of another kernel, and sign as it does."""
        app.connection_file = str(connection_file)
        found = parse_json(connection_file.read_text("utf-8"))
        self._shell.kernel.session.key = found["key"].encode()


def begin_history(history: Any) -> None:
    """Go on in a session of its own in the database that all kernels of a user write to.

    The lines of the present one have been written, by the process that was saved: the same numbers
    again would be refused. `In` and `Out` stay.
    """
    try:
        history.new_session()
    except Exception:  # such as sqlite's, of a database that is gone
        history.enabled = False


def drop_requests(shell: Any) -> None:
    """Refuse what was asked of the process that was saved, and has not begun."""
    abort = getattr(shell.kernel, "_abort_queues", None)
    if abort is not None:
        abort()


def step_aside(shell: Any) -> None:
    """Execute nothing from now on: another process does, and this one is about to be ended."""
    shell.events.register("pre_execute", wait_for_the_end)


def wait_for_the_end() -> None:
    """Called by IPython before it executes anything; an interrupt would let it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    never = threading.Event()
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            never.wait()
