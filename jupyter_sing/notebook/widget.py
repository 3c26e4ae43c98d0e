"""The state of this notebook's session as a live widget: ``widget.status()``.

    status() -> LiveStatus   shown as a cell's result; a table where there are no widgets
    ├ view_model.py        its texts
    └ status_watcher.py    source of its data; sends the requests of its buttons

Built from stock ipywidgets, which are imported when it is first shown. Updates arrive in a thread,
so it is current while a cell runs. Requests of buttons are made in threads, too, so that no click
waits. It receives nothing while no view is open, as far as front ends report the number of views.

A `LiveStatus` is not a widget itself, so that a notebook that holds one can be saved. A restored
one is another `LiveStatus`, which is live when it is shown.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jupyter_sing.notebook import status_text, status_watcher, view_model
from jupyter_sing.notebook.status_watcher import ElsewhereError, KnownStatus
from jupyter_sing.notebook.view_model import View
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import Pin, Resume, SessionReply, Suspend

__all__ = ["LiveStatus", "status"]

#: How long the first view waits for the daemon, which answers at once unless it is replaced.
FIRST_SECONDS_MAX = 2.0
#: Operations that take longer are shown as a bar.
BAR_SECONDS = 0.5
_WIDGET = "application/vnd.jupyter.widget-view+json"


def status() -> LiveStatus:
    """Show the state of this notebook's session, its device and all devices; kept up to date.

    Returns
    -------
    LiveStatus
        Shown as the result of a cell, or by ``display``. In a kernel without a session it shows
        why there is none.

    Examples
    --------
    >>> from jupyter_sing import widget
    >>> widget.status()
    """
    return LiveStatus()


class LiveStatus:
    """Live status, see `status`. Its widgets are made when it is first shown."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all below
        self._panel: StatusPanel | None = None
        self._closed = False

    @property
    def box(self) -> Any:
        """Widget itself, for use inside others; None where there are no widgets."""
        with self._lock:
            if self._panel is None and not self._closed and _has_kernel():
                widgets = _ipywidgets()
                self._panel = StatusPanel(widgets) if widgets is not None else None
            return None if self._panel is None else self._panel.box

    def close(self) -> None:
        """Remove it from the page and stop receiving updates; idempotent."""
        with self._lock:
            self._closed = True
            panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return status, ()

    def __repr__(self) -> str:
        return str(self._bundle()["text/plain"])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Called by IPython: return the widget, and static content for viewers without widgets."""
        box = self.box
        bundle = self._bundle()
        if box is not None:
            model = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
            bundle[_WIDGET] = model
        return bundle

    def _bundle(self) -> dict[str, Any]:
        """Return the current state as static text and HTML."""
        if self._closed:
            return _plain(view_model.CLOSED)
        if reason := status_watcher.reason():
            return _plain(f"CPU only: {reason}")
        panel = self._panel
        seen = panel.seen() if panel is not None else status_watcher.look()
        shown = View.of(seen, status_watcher.session_id())
        note = view_model.static_note(datetime.now())
        if panel is None and _ipywidgets() is None:
            note = f"{view_model.WITHOUT_WIDGETS} {note}"
        return {"text/plain": shown.text(note), "text/html": shown.html(note)}


def _plain(text: str) -> dict[str, Any]:
    return {"text/plain": text, "text/html": view_model.message_html([text])}


def _ipywidgets() -> Any:
    """Return the module, or None if the kernel's environment does not have it."""
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets


def _has_kernel() -> bool:
    """True if there is a session to show, and a kernel that can send it to a front end."""
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel") and not status_watcher.reason()


class StatusPanel:
    """Widgets of one `LiveStatus`.

    Parameters
    ----------
    widgets : module
        ipywidgets.
    """

    def __init__(self, widgets: Any) -> None:
        self._lock = threading.RLock()
        self._seen: KnownStatus | None = None
        self._first = threading.Event()
        self._progress_since: tuple[str, float] | None = None
        self._view, self._changed_at = View.of(None, ""), datetime.now()
        self._busy: dict[str, str] = {}
        self._message: list[str] = []
        self._had_views = False
        # Value that the toggle shows. Set only when it is to change: else a click could be lost.
        self._pin_shown = False

        self._state, self._far = widgets.HTML(), widgets.HTML()
        self._message_box, self._devices = widgets.HTML(), widgets.HTML()
        self._buttons = {
            name: widgets.Button(description=name, tooltip=view_model.HINTS[name], icon=icon)
            for name, icon in ((view_model.SUSPEND, "pause"), (view_model.RESUME, "play"))
        }
        self._buttons[view_model.PIN] = widgets.ToggleButton(
            description=view_model.PIN, tooltip=view_model.HINTS[view_model.PIN], icon="thumb-tack"
        )
        self._buttons[view_model.CHECKPOINT] = widgets.Button(
            description=view_model.CHECKPOINT,
            tooltip=view_model.HINTS[view_model.CHECKPOINT],
            icon="save",
        )
        for name, verb in (
            (view_model.SUSPEND, self._suspend),
            (view_model.RESUME, self._resume),
            (view_model.CHECKPOINT, self._checkpoint),
        ):
            self._buttons[name].on_click(lambda _, name=name, verb=verb: self._begin(name, verb))
        self._buttons[view_model.PIN].observe(self._on_pin, "value")
        row = widgets.HBox(list(self._buttons.values()))
        row.layout.flex_flow = "row wrap"
        children = [self._state, row, self._far, self._message_box, self._devices]
        self.box = widgets.VBox(children, _view_count=0)  # 0: the front end is to count its views
        self.box.observe(self._on_views, "_view_count")
        self._show()
        status_watcher.current.join(self._take)

    def seen(self) -> KnownStatus | None:
        """Return what is shown; wait a short time for the first update."""
        self._first.wait(FIRST_SECONDS_MAX)
        return self._seen

    def close(self) -> None:
        """Remove the widgets from the page."""
        status_watcher.current.leave(self._take)
        with self._lock:
            for each in self._widgets():
                each.close()

    def _widgets(self) -> list[Any]:
        inner = [self._state, self._far, self._message_box, self._devices, *self._buttons.values()]
        return [self.box, *self.box.children[1:2], *inner]

    # ---------------------------------------------------------------- display

    def _take(self, seen: KnownStatus) -> None:
        """Take an update; called by the watcher in its thread, or in the thread that joins it."""
        if self.box.comm is None:  # all widgets were closed
            status_watcher.current.leave(self._take)
            return
        with self._lock:
            again = seen.anew and self._first.is_set()
            self._seen = seen
            self._show()
            if again:  # the front end may show the output of another process
                for each in self._widgets():
                    each.send_state()
        self._first.set()

    def _show(self) -> None:
        with self._lock:
            before, shown = self._view, View.of(self._seen, status_watcher.session_id())
            if shown != before:
                self._view, self._changed_at = shown, datetime.now()
            _set(self._state, "value", shown.state_html())
            _set(self._far, "value", shown.progress_html() if self._takes_long(shown) else "")
            message = [*filter(None, self._busy.values()), *self._message]
            _set(self._message_box, "value", view_model.message_html(message))
            since = view_model.since_html(self._changed_at)
            _set(self._devices, "value", shown.devices_html() + since)
            for name, button in self._buttons.items():
                _set(button, "disabled", name not in shown.can or name in self._busy)
            if view_model.PIN not in self._busy and shown.pinned != self._pin_shown:
                self._pin_shown = shown.pinned
                self._buttons[view_model.PIN].value = shown.pinned

    def _takes_long(self, shown: View) -> bool:
        """True if the save or restore in progress has taken half a second."""
        if not shown.progress:
            self._progress_since = None
            return False
        what, now = shown.progress.split(":")[0], time.monotonic()
        if self._progress_since is None or self._progress_since[0] != what:
            self._progress_since = what, now
        return now - self._progress_since[1] >= BAR_SECONDS

    def _on_views(self, change: Any) -> None:
        """Called when the front end reports the number of views."""
        if change["new"]:
            self._had_views = True
            status_watcher.current.join(self._take)
        elif self._had_views:
            status_watcher.current.leave(self._take)

    # ---------------------------------------------------------------- buttons

    def _on_pin(self, change: Any) -> None:
        """Called when the toggle is pressed, and when `_show` sets it, which makes no request."""
        pinned = bool(change["new"])
        with self._lock:
            if pinned == self._pin_shown:
                return
            self._pin_shown = pinned
        self._begin(view_model.PIN, lambda session: self._pin(session, pinned))

    def _begin(self, name: str, verb: Callable[[str], list[str]]) -> None:
        """Perform the action of a button in a thread, unless it is already in progress."""
        session = status_watcher.session_id()
        with self._lock:
            if name in self._busy or not session:
                return
            self._busy[name], self._message = view_model.DOING[name], []
            self._show()

        def work() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            message: list[str] = []
            try:
                message = verb(session)
            except ElsewhereError:
                pass  # the request was not made by this process
            except (ControlError, OSError) as error:
                message = [str(error)]
            finally:
                with self._lock:
                    del self._busy[name]
                    self._message = message
                    self._show()

        threading.Thread(target=work, name=f"jupyter_sing {name}", daemon=True).start()

    def _suspend(self, session: str) -> list[str]:
        status_watcher.ask(SessionReply, Suspend(session, "Suspended by you in the notebook"))
        return []

    def _resume(self, session: str) -> list[str]:
        status_watcher.ask(SessionReply, Resume(session))
        return []

    def _pin(self, session: str, pinned: bool) -> list[str]:
        found = status_watcher.ask(SessionReply, Pin(session, pinned)).session
        with self._lock:
            if self._seen is not None:  # the notification may come later, and the toggle shows this
                sessions = {**self._seen.sessions, session: found}
                self._seen = KnownStatus(self._seen.devices, sessions, self._seen.problem)
        return [status_text.pinned_text(found)]

    def _checkpoint(self, session: str) -> list[str]:
        known = self._seen.sessions.get(session) if self._seen is not None else None
        made = status_watcher.checkpoint(session, _checkpoint_name(known["name"] if known else ""))
        return status_text.checkpoint_made_lines(made)


def _checkpoint_name(session_name: str) -> str:
    """Return a name made of the notebook and the time, as the daemon makes it."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", session_name.removesuffix(".ipynb")).strip("-")[:60]
    return f"{stem or 'notebook'}-{time.strftime('%Y%m%d-%H%M%S')}"


def _set(widget: Any, trait: str, value: object) -> None:
    """Set a trait if its value differs."""
    if getattr(widget, trait) != value:
        setattr(widget, trait, value)
