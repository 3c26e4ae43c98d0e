"""Replacement of a kernel's process by one restored from a checkpoint, on both sides.

Uses only the standard library, and objects passed by IPython and ipykernel.
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
    """Aborts the saving of a checkpoint in the restored process, not in the one that saved it.

    It is shown as one line instead of a traceback. It is not an `Exception`: no handler may take it
    for a failure, and continue with work that another process has done already.

    Parameters
    ----------
    name : str
        Name of the checkpoint.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"Restored {name!r} (its process)." if name else "Restored (its process).")

    def _render_traceback_(self) -> list[str]:
        """Return the text shown instead of a traceback; called by IPython."""
        return [str(self)]


def obstacle(kernel: Any) -> str:
    """Return why a kernel cannot be saved and restored; "" if it can.

    Saving closes the connection between the debugger and the kernel, and the thread that reads the
    control channel would wait for it forever.
    """
    used = getattr(getattr(kernel, "debugger", None), "debugpy_initialized", False)
    return "The debugger was used, and its connection cannot be saved." if used else ""


class Revival:
    """Makes a restored process the kernel that it replaces; see `activation.state.on_restored`.

    Parameters
    ----------
    shell : InteractiveShell
        Shell of a kernel.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, woken: Woken) -> None:
        """Called in a thread of ours, before this process receives requests."""
        app = self._shell.kernel.parent
        for name in _PORTS:
            setattr(app, name, woken.ports.get(getattr(app, name), getattr(app, name)))
        if woken.connection_file:
            # Several processes may continue from the same checkpoint.
            self._adopt(app, Path(woken.connection_file))
            begin_history(self._shell.history_manager)
        journal = woken.environment.get(tracker.JOURNAL_VARIABLE)
        os.environ.update(woken.environment)
        if journal:
            tracker.follow(Path(journal))

    def _adopt(self, app: Any, connection_file: Path) -> None:
        """Use the connection file of another kernel, and its key for signatures."""
        app.connection_file = str(connection_file)
        found = parse_json(connection_file.read_text("utf-8"))
        self._shell.kernel.session.key = found["key"].encode()


def begin_history(history: Any) -> None:
    """Continue in a new session of the database to which all kernels of a user write.

    The saved process has written the lines of the current session, and the database would refuse
    the same numbers. `In` and `Out` stay.
    """
    try:
        history.new_session()
    except Exception:  # such as sqlite's, of a deleted database
        history.enabled = False


def drop_requests(shell: Any) -> None:
    """Refuse requests to the saved process that have not begun."""
    abort = getattr(shell.kernel, "_abort_queues", None)
    if abort is not None:
        abort()


def step_aside(shell: Any) -> None:
    """Execute nothing from now on: another process replaces this one, which is about to end."""
    shell.events.register("pre_execute", wait_for_the_end)


def wait_for_the_end() -> None:
    """Block; called by IPython before it executes anything, which an interrupt would let it do."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    never = threading.Event()
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            never.wait()
