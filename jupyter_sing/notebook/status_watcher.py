"""What the daemon says of its devices and sessions, as it changes (standard library only).

One thread of a kernel holds one connection for all who want to know, and only while somebody does.
It waits for what comes and asks nothing; it lets go when this process is to be saved, and comes
back with it (see `kernelproxy.common.ipc.detach`), as it does when the daemon was replaced.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import (
    AwaitCheckpoint,
    Changed,
    Checkpoint,
    CheckpointReply,
    Message,
    Status,
    StatusReply,
    Watch,
)
from kernelproxy.kernel import activation

#: The next daemon answers when it has taken over what the last one had.
ANSWER_SECONDS_MAX = 120.0
#: Of what people ask for: it may wait for room, for a cell, or for the disk.
VERB_SECONDS_MAX = 3600.0
LOST = "The jupyter_sing daemon has ended. Looking for the next one."
#: Between two attempts to reach a daemon that is not there, the first and the longest.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.5, 30.0

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True)
class Seen:
    """What is known at one moment.

    Parameters
    ----------
    devices : tuple of dict
        As in `StatusReply`.
    sessions : dict of str to dict
        By id; as in `StatusReply`.
    problem : str
        Why nobody can say how it is now, for people; "" if this is how it is.
    anew : bool
        Whether what was shown since the last may have been shown by another process: this comes
        over another connection; or this process was restored and a session has ended, perhaps that
        of the process in whose place this one is. Till then nobody has seen what this one says.
    """

    devices: Sequence[dict[str, Any]] = ()
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""
    anew: bool = False

    @classmethod
    def whole(cls, reply: StatusReply) -> Seen:
        """Take what the daemon says of everything."""
        return cls(tuple(reply.devices), {each["id"]: each for each in reply.sessions}, anew=True)

    def after(self, changed: Changed) -> Seen:
        """Take what the daemon says of what has changed."""
        devices = {each["id"]: each for each in [*self.devices, *changed.devices]}
        sessions = {**self.sessions, **{each["id"]: each for each in changed.sessions}}
        for ended in changed.gone:
            sessions.pop(ended, None)
        anew = bool(changed.gone) and detach.current.restored
        return Seen(tuple(devices.values()), sessions, anew=anew)


Listener = Callable[[Seen], object]


class Watcher:
    """Tells those who have joined what the daemon says."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Called in a forked child: it has no thread, and nobody who wants to know."""
        # Held while somebody is told, so that all hear what was first first; they may leave then.
        self._lock = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._seen: Seen | None = None
        self._watch: _Watch | None = None

    def join(self, listener: Listener) -> None:
        """Tell somebody from now on, at once if something is known; doing it twice is no error.

        Parameters
        ----------
        listener : callable
            Called in a thread of ours, or in this one; must not wait for anything.
        """
        with self._lock:
            if listener in self._listeners:
                return
            self._listeners = (*self._listeners, listener)
            if self._watch is None:
                self._watch = _Watch(self._tell)
                self._watch.start()
            if self._seen is not None:
                self._tell_one(listener, self._seen)

    def leave(self, listener: Listener) -> None:
        """Tell somebody no more; doing it twice is no error."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)
            if self._listeners or self._watch is None:
                return
            watch, self._watch, self._seen = self._watch, None, None
            watch.end()

    def disown(self) -> None:
        """Called in a forked child: its copy of the connection leads nowhere."""
        watch = self._watch
        self.reset()
        if watch is not None:
            watch.disown()

    def _tell(self, watch: _Watch, seen: Seen) -> None:
        with self._lock:
            if watch is not self._watch:
                return  # the last one has left
            self._seen = seen
            for each in self._listeners:
                self._tell_one(each, seen)

    def _tell_one(self, listener: Listener, seen: Seen) -> None:
        """Tell somebody, who is told no more if he cannot hear it: others are not concerned."""
        try:
            listener(seen)
        except Exception:  # such as that of a widget whose kernel is about to end
            self.leave(listener)


class _Watch(threading.Thread):
    """One thread with one connection, until it is ended.

    Parameters
    ----------
    tell : callable
        Called with this and what is known.
    """

    def __init__(self, tell: Callable[[_Watch, Seen], object]) -> None:
        super().__init__(name="jupyter_sing watch", daemon=True)
        self._tell = tell
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._control: Control | None = None
        self._seen = Seen()
        self._pause = 0.0

    def end(self) -> None:
        """End soon; does not wait for it."""
        self._ended.set()
        with self._lock:
            if self._control is not None:
                self._control.abort()

    def disown(self) -> None:
        """See `Watcher.disown`."""
        if self._control is not None:
            self._control.close()

    def run(self) -> None:
        """See `Thread`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the user's
        while not self._ended.wait(self._pause):
            try:
                self._attempt()
            except ControlError as error:
                self._pause = min(max(2 * self._pause, _PAUSE_SECONDS), _PAUSE_SECONDS_MAX)
                self._say(replace(self._seen, problem=error.message, anew=False))

    def _attempt(self) -> None:
        """Listen over one connection till its end."""
        with connect(start=False) as control, detach.current.giving_way(control.abort) as way:
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
        seen = Seen.whole(control.expect(StatusReply, Watch(), ANSWER_SECONDS_MAX))
        self._pause = 0.0
        while True:
            self._say(seen)
            try:
                message = control.more()
            except ControlError as error:
                raise ControlError(LOST, error.reason) from error
            if isinstance(message, Changed):
                seen = self._seen.after(message)

    def _say(self, seen: Seen) -> None:
        self._seen = seen
        self._tell(self, seen)


def look() -> Seen:
    """Ask once how it is now; called in a cell, which does not count as work."""
    try:
        with connect(start=False) as control:
            request = Status(session_id())
            return Seen.whole(control.expect(StatusReply, request, ANSWER_SECONDS_MAX))
    except ControlError as error:
        return Seen(problem=error.message)


class ElsewhereError(ControlError):
    """Whoever asked is another process now, made of the images of the one that did."""

    def __init__(self) -> None:
        super().__init__("This process was restored since.", "ended")


def ask(reply_type: type[Reply], request: Message, after: Message | None = None) -> Reply:
    """Ask for something that may take long, in a thread, and let this process leave meanwhile.

    Parameters
    ----------
    reply_type : type
        Of the reply.
    request : Message
        Is asked again when the process is back: none does harm when it is made twice.
    after : Message, optional
        What is asked instead, if it has an answer: the process may have left for this very thing.

    Raises
    ------
    ControlError
        If the daemon refuses or is gone.
    ElsewhereError
        In a process that was restored.
    """
    asked = request
    while True:
        returns = detach.current.returns
        with connect(start=False) as control, detach.current.giving_way(control.abort) as way:
            try:
                return control.expect(reply_type, asked, VERB_SECONDS_MAX)
            except ControlError as error:
                if not way.asked:
                    if asked is request or error.reason != "ended":
                        raise
                    asked = request  # it has left for something else
                    continue
        if detach.current.wait(returns, ANSWER_SECONDS_MAX).restored:
            raise ElsewhereError
        asked = after or request


def checkpoint(session: str, name: str) -> dict[str, Any]:
    """Save this notebook as soon as no cell runs, and return its checkpoint; as `ask`.

    Its process may leave to be saved, and must know then which one to ask for: it has a name.
    """
    after = AwaitCheckpoint(session, name)
    return ask(CheckpointReply, Checkpoint(session, name), after).checkpoint


#: Of this process.
current = Watcher()
os.register_at_fork(after_in_child=current.disown)


def session_id() -> str:
    """Id of this kernel's session, "" if there is none."""
    return "" if reason() else activation.current().session


def reason() -> str:
    """Why this kernel has no device; "" if it has one."""
    state = activation.current()
    found = state.reason or os.environ.get("SING_REASON", "")
    return found or ("" if state.session else "this kernel was started without a GPU session")
