"""Progress of a command on standard error: a bar, or lines that name what it waits for."""

from __future__ import annotations

import sys
import threading
import time

from jupyter_sing.notebook import status_text
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import Changed, StatusReply, WatchRequest
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.readable import without_turn
from kernelproxy.common.units import bytes_text

SHOWN_AFTER_SECONDS = 0.5
WAIT_SHOWN_AFTER_SECONDS = 1.0
_CLEAR = "\r\x1b[K"
_WIDTH = 20


class ProgressLine:
    """Progress line on standard error, if that is a terminal, after half a second.

    Parameters
    ----------
    what : str
        Name of the operation.
    wanted : bool
        Whether it may be shown at all: not for programs.
    """

    def __init__(self, what: str, *, wanted: bool = True) -> None:
        self._what, self._began = what, time.monotonic()
        self._wanted, self._shown = wanted, False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def show_bytes(self, done: int, total: int) -> None:
        """Show how many bytes are done."""
        if total:
            self._show(done, total, f"{bytes_text(done)} of {bytes_text(total)}")

    def show_notebooks(self, done: int, total: int) -> None:
        """Show how many notebooks are done."""
        if total:
            self._show(done, total, f"{done} of {total} notebook{'' if total == 1 else 's'}")

    def show_share(self, done: int, total: int) -> None:
        """Show how much is done."""
        if total:
            self._show(done, total, f"{100 * done // total} %")

    def _show(self, done: int, total: int, text: str) -> None:
        if not self._wanted or time.monotonic() - self._began < SHOWN_AFTER_SECONDS:
            return
        if sys.stderr.isatty():
            self._shown = True
            bar = ("#" * (_WIDTH * min(done, total) // total)).ljust(_WIDTH, ".")
            line = f"{_CLEAR}{self._what} [{bar}] {text}"
            print(line, end="", file=sys.stderr, flush=True)


class WaitLines:
    """Reporter of the state of the session for which a command waits, at each change.

    Parameters
    ----------
    session : str
        Id, unique prefix of one, or name.
    wanted : bool
        Whether anything may be printed at all: not for programs.
    """

    def __init__(self, session: str, *, wanted: bool = True) -> None:
        self._session, self._wanted = session, wanted
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._over = False
        self._last_text = ""
        self._timer = threading.Timer(WAIT_SHOWN_AFTER_SECONDS, self._watch)
        self._timer.daemon = True

    def __enter__(self) -> WaitLines:
        if self._wanted:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._control is not None:
                self._control.abort()

    def _watch(self) -> None:
        """Print changes; called in a thread, after a delay."""
        try:
            with connect(start=False) as control:
                with self._lock:
                    self._control = control
                    if self._over:
                        return
                reply = control.expect(StatusReply, WatchRequest(self._session))
                self._print_state(reply.sessions)
                while True:
                    changed = control.more()
                    if isinstance(changed, Changed):
                        self._print_state(changed.sessions)
        except ControlError:  # the command itself reports the error, or it is done
            pass
        finally:
            with self._lock:
                self._control = None

    def _print_state(self, sessions: list[SessionView]) -> None:
        for session in sessions:
            text = f"Waiting for {session['name']}. {status_text.state_text(session)}"
            with self._lock:
                # The expected time changes continuously: compare without it.
                if self._over or without_turn(text) == without_turn(self._last_text):
                    continue
                self._last_text = text
                print(f"{text} (Ctrl-C: stop waiting)", file=sys.stderr, flush=True)
