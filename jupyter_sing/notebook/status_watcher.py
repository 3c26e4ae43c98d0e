"""Current state of devices and sessions, as the daemon reports changes (standard library only).

One thread of a kernel holds one connection for all listeners, and only while there are any. It
waits for notifications and polls nothing. It disconnects when this process is to be saved, and
reconnects with the process (see `kernelproxy.common.ipc.detach`), or when the daemon was replaced.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import (
    AwaitCheckpoint,
    Changed,
    Checkpoint,
    CheckpointReply,
    Message,
    StatusReply,
    StatusRequest,
    WatchRequest,
)
from kernelproxy.common.protocol.views import CheckpointView, DeviceView, SessionView
from kernelproxy.kernel import activation

log = logging.getLogger(__name__)

#: A new daemon answers once it has taken over the state of the previous one.
ANSWER_SECONDS_MAX = 120.0
#: For users' requests, which may wait for room, for a cell, or for the disk.
VERB_SECONDS_MAX = 3600.0
LOST = "The jupyter_sing daemon has ended. Reconnecting to the next one."
#: Pauses between two attempts to reach a daemon that does not run: the first, and the longest.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.5, 30.0

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True)
class KnownStatus:
    """Snapshot of what is known.

    Parameters
    ----------
    devices : tuple of dict
        As in `StatusReply`.
    sessions : dict of str to dict
        By id; as in `StatusReply`.
    problem : str
        User-facing text why the current state is unknown; "" if this is the current state.
    anew : bool
        True if front ends may show the output of another process since the last update: because
        this comes over another connection; or because this process was restored and a session has
        ended, perhaps that of the process which this one replaces. Until then no front end shows
        the output of this process.
    """

    devices: Sequence[DeviceView] = ()
    sessions: dict[str, SessionView] = field(default_factory=dict)
    problem: str = ""
    anew: bool = False

    @classmethod
    def whole(cls, reply: StatusReply) -> KnownStatus:
        """Return the state after a full status reply."""
        return cls(tuple(reply.devices), {each["id"]: each for each in reply.sessions}, anew=True)

    def after(self, changed: Changed) -> KnownStatus:
        """Return the state after a notification of changes."""
        devices = {each["id"]: each for each in [*self.devices, *changed.devices]}
        sessions = {**self.sessions, **{each["id"]: each for each in changed.sessions}}
        for ended in changed.gone:
            sessions.pop(ended, None)
        anew = bool(changed.gone) and detach.current.restored
        return KnownStatus(tuple(devices.values()), sessions, anew=anew)


Listener = Callable[[KnownStatus], object]


class StatusWatcher:
    """Distributor of the daemon's notifications to listeners."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over; called in a forked child, which has no thread and no listeners."""
        # Held while notifying, so that listeners receive updates in order; re-entrant, because a
        # listener may leave while it is notified.
        self._lock = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._seen: KnownStatus | None = None
        self._watch: _WatcherThread | None = None

    def join(self, listener: Listener) -> None:
        """Add a listener and notify it at once if something is known; idempotent.

        Parameters
        ----------
        listener : callable
            Called in a thread of the watcher, or in the caller's; must not block.
        """
        with self._lock:
            if listener in self._listeners:
                return
            self._listeners = (*self._listeners, listener)
            if self._watch is None:
                self._watch = _WatcherThread(self._notify)
                self._watch.start()
            if self._seen is not None:
                self._notify_listener(listener, self._seen)

    def leave(self, listener: Listener) -> None:
        """Remove a listener; idempotent."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)
            if self._listeners or self._watch is None:
                return
            watch, self._watch, self._seen = self._watch, None, None
            watch.end()

    def disown(self) -> None:
        """Close the copy of the connection; called in a forked child, which must not use it."""
        watch = self._watch
        self.reset()
        if watch is not None:
            watch.disown()

    def _notify(self, watch: _WatcherThread, seen: KnownStatus) -> None:
        with self._lock:
            if watch is not self._watch:
                return  # the last listener has left
            self._seen = seen
            for each in self._listeners:
                self._notify_listener(each, seen)

    def _notify_listener(self, listener: Listener, seen: KnownStatus) -> None:
        """Notify one listener; drop it if it raises, without affecting the others."""
        try:
            listener(seen)
        except Exception:  # such as that of a widget whose kernel is about to end
            log.info("A listener failed and gets no more updates.", exc_info=True)
            self.leave(listener)


class _WatcherThread(threading.Thread):
    """Thread with one connection at a time, until it is ended.

    Parameters
    ----------
    notify : callable
        Called with this object and what is known.
    """

    def __init__(self, notify: Callable[[_WatcherThread, KnownStatus], object]) -> None:
        super().__init__(name="jupyter_sing watch", daemon=True)
        self._notify = notify
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._control: Control | None = None
        self._seen = KnownStatus()
        self._pause = 0.0

    def end(self) -> None:
        """End the thread soon; do not wait for it."""
        self._ended.set()
        with self._lock:
            if self._control is not None:
                self._control.abort()

    def disown(self) -> None:
        """See `StatusWatcher.disown`."""
        if self._control is not None:
            self._control.close()

    def run(self) -> None:
        """See `Thread`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the user's thread
        while not self._ended.wait(self._pause):
            try:
                self._attempt()
            except ControlError as error:
                self._pause = min(max(2 * self._pause, _PAUSE_SECONDS), _PAUSE_SECONDS_MAX)
                self._publish(replace(self._seen, problem=error.message, anew=False))

    def _attempt(self) -> None:
        """Receive over one connection until it ends."""
        with connect(start=False) as control, detach.current.interruptible(control.abort) as way:
            with self._lock:
                self._control = control
            try:
                if not self._ended.is_set():
                    self._listen(control)
            except ControlError:
                if not way.asked:
                    raise
            finally:
                with self._lock:
                    self._control = None

    def _listen(self, control: Control) -> None:
        seen = KnownStatus.whole(control.expect(StatusReply, WatchRequest(), ANSWER_SECONDS_MAX))
        self._pause = 0.0
        while True:
            self._publish(seen)
            try:
                message = control.more()
            except ControlError as error:
                raise ControlError(LOST, error.reason) from error
            if isinstance(message, Changed):
                seen = self._seen.after(message)

    def _publish(self, seen: KnownStatus) -> None:
        self._seen = seen
        self._notify(self, seen)


def look() -> KnownStatus:
    """Request the current state once; called in a cell, where this does not count as work."""
    try:
        with connect(start=False) as control:
            request = StatusRequest(session_id())
            return KnownStatus.whole(control.expect(StatusReply, request, ANSWER_SECONDS_MAX))
    except ControlError as error:
        return KnownStatus(problem=error.message)


class ElsewhereError(ControlError):
    """The calling process was replaced by one restored from its images."""

    def __init__(self) -> None:
        super().__init__("This process has been restored from a checkpoint.", "ended")


def ask(reply_type: type[Reply], request: Message, after: Message | None = None) -> Reply:
    """Make a request that may take long, in a thread; this process can detach meanwhile.

    Parameters
    ----------
    reply_type : type
        Type of the reply.
    request : Message
        Repeated when the process has reattached: all such requests are idempotent.
    after : Message, optional
        Sent instead of `request` after reattaching: the process may have detached because of the
        request itself. If its error is "ended", `request` is sent again.

    Raises
    ------
    ControlError
        If the daemon refuses or is gone.
    ElsewhereError
        In a process that was restored.
    """
    sent = request
    while True:
        returns = detach.current.returns
        with connect(start=False) as control, detach.current.interruptible(control.abort) as way:
            try:
                return control.expect(reply_type, sent, VERB_SECONDS_MAX)
            except ControlError as error:
                if not way.asked:
                    if sent is request or error.reason != "ended":
                        raise
                    sent = request  # the process has detached for another reason
                    continue
        if detach.current.wait(returns, ANSWER_SECONDS_MAX).restored:
            raise ElsewhereError
        sent = after or request


def checkpoint(session: str, name: str) -> CheckpointView:
    """Save this notebook as soon as no cell runs, and return its checkpoint; see `ask`.

    The process may detach to be saved. The name lets it ask for the right checkpoint afterwards.
    """
    after = AwaitCheckpoint(session, name)
    return ask(CheckpointReply, Checkpoint(session, name), after).checkpoint


#: The watcher of this process.
current = StatusWatcher()
os.register_at_fork(after_in_child=current.disown)


def session_id() -> str:
    """Return the id of this kernel's session, "" if there is none."""
    return "" if reason() else activation.current().session


def reason() -> str:
    """Return why this kernel has no device; "" if it has one."""
    state = activation.current()
    found = state.reason or os.environ.get("SING_REASON", "")
    return found or ("" if state.session else "this kernel was started without a GPU session")
