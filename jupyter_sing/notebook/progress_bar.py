"""Progress bar of a cell that runs ``%sing`` (standard library and IPython only)."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from typing import Any

from jupyter_sing.notebook import status_watcher, view_model
from kernelproxy.common.units import bytes_text

BAR_SECONDS = 0.5


class ProgressBar:
    """Progress bar, shown when an operation takes longer than half a second.

    Parameters
    ----------
    what : str
        Name of the operation.
    session : str, optional
        Session whose state is shown while no byte counts are known: it may have to wait.
    """

    def __init__(self, what: str, session: str = "") -> None:
        self._what, self._session, self._began = what, session, time.monotonic()
        self._lock = threading.RLock()
        self._shown: Any = None
        self._counts = self._over = False
        # Output of the other threads must belong to this cell, too.
        self._context = contextvars.copy_context()
        self._timer = threading.Timer(BAR_SECONDS, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> ProgressBar:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown is not None:
                self._shown.update({"text/plain": ""}, raw=True)
        status_watcher.current.leave(self._on_status)

    def show(self, done: int, total: int) -> None:
        """Show progress in bytes."""
        if time.monotonic() - self._began < BAR_SECONDS or not total:
            return
        text = f"{self._what}: {bytes_text(done)} of {bytes_text(total)}"
        with self._lock:
            self._counts = True
            self._show(text, f'value="{done}" max="{total}" ')

    def _begin(self) -> None:
        """Show the bar; called by the timer after half a second. Byte counts may never arrive."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the user's thread
        self._wait(f"{self._what} …")
        if self._session:
            status_watcher.current.join(self._on_status)
            if self._over:  # ended in the meantime
                status_watcher.current.leave(self._on_status)

    def _on_status(self, seen: status_watcher.KnownStatus) -> None:
        """Show the session's new state; called by the watcher in its thread."""
        session = seen.sessions.get(self._session)
        if session is not None and not seen.problem:
            self._wait(
                f"{self._what}: {view_model.queue_text(session) or view_model.word(session)}"
            )

    def _wait(self, text: str) -> None:
        """Show that work continues, while no byte counts are known."""
        with self._lock:
            if not self._over and not self._counts:
                self._context.run(self._show, text, "")

    def _show(self, text: str, far: str) -> None:
        bar = f'<progress {far}aria-label="{text}"></progress> {text}'
        data = {"text/plain": text, "text/html": bar}
        if self._shown is None:
            from IPython.display import display

            self._shown = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._shown.update(data, raw=True)
