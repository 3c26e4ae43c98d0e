"""Detached state of a process, which leaves its session for a while so that it can be saved.

While it is detached, it has no connection to the daemon, and callers that need one wait. It
detaches when all open connections are closed; holders of long-lived ones are asked to close them
(`Absence.interruptible`). `kernelproxy.kernel.activation.agent_connection` detaches and reattaches.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernelproxy.common.errors import ControlError


@dataclass(frozen=True)
class Return:
    """Outcome of a reattach, or of the replacement of a daemon by another one.

    Parameters
    ----------
    restored : bool
        Whether this is a new process, restored from images of the one that detached.
    problem : str
        User-facing reason why the session is lost; "" if it is not.
    """

    restored: bool = False
    problem: str = ""


class Interruptible:
    """Holder of a connection that can be closed for a while.

    Parameters
    ----------
    interrupt : callable
        See `Absence.interruptible`.
    """

    def __init__(self, interrupt: Callable[[], object]) -> None:
        self._interrupt = interrupt
        #: True if it was asked to close its connection: then the connection's end is expected.
        self.asked = False

    def ask(self) -> None:
        """Ask the holder to close its connection."""
        self.asked = True
        self._interrupt()


class Absence:
    """State of this process, attached or detached, and the waiters for its changes."""

    def __init__(self) -> None:
        #: Returns why this process could not reattach after it detached; "" if it can.
        self.obstacle: Callable[[], str] = str
        self.reset()

    def reset(self) -> None:
        """Called in a forked child, where a lock held by another thread is never released."""
        self._changed = threading.Condition()
        self._away = False
        self._connecting = 0
        self._open: weakref.WeakSet[object] = weakref.WeakSet()
        self._interruptible: set[Interruptible] = set()
        self._returns = 0
        self._last = Return()

    @property
    def returns(self) -> int:
        """How often the process has reattached; for `wait`."""
        return self._returns

    @property
    def restored(self) -> bool:
        """True if this process was restored from images of the one that detached last."""
        return self._last.restored

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Context for opening a connection: waits while the process is detached."""
        with self._changed:
            while self._away:
                self._changed.wait()
            self._connecting += 1
        try:
            yield
        finally:
            with self._changed:
                self._connecting -= 1
                self._changed.notify_all()

    def note_opened(self, control: object) -> None:
        """Register an open connection."""
        with self._changed:
            self._open.add(control)

    def note_closed(self, control: object) -> None:
        """Unregister a closed connection. Idempotent."""
        with self._changed:
            self._open.discard(control)
            self._changed.notify_all()

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], object]) -> Iterator[Interruptible]:
        """Context for holding a connection that must not prevent the process from detaching.

        Parameters
        ----------
        interrupt : callable
            Called in another thread when the process must detach. It makes the holder close the
            connection soon, such as `Control.abort`. It must not wait, and must not open or close a
            connection itself.
        """
        there = Interruptible(interrupt)
        with self._changed:
            self._interruptible.add(there)
            if self._away:  # since the connection was made
                there.ask()
        try:
            yield there
        finally:
            with self._changed:
                self._interruptible.discard(there)

    def begin(self, seconds: float) -> None:
        """Detach as soon as there is no open connection.

        Raises
        ------
        ControlError
            If that takes longer than `seconds`, or there is an obstacle; then the process stays
            attached.
        """
        if why := self.obstacle():
            raise ControlError(why, "unavailable")
        deadline = time.monotonic() + seconds
        with self._changed:
            self._away = True
            self._changed.notify_all()
            for each in self._interruptible:
                each.ask()
            while self._connecting or self._open:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._away = False
                    self._changed.notify_all()
                    raise ControlError(
                        "The notebook is waiting for the jupyter_sing daemon.", "busy"
                    )
                # A connection that is garbage-collected without `close` sends no notification.
                self._changed.wait(min(left, 0.05))

    def end(self, how: Return) -> None:
        """Mark the process as attached again; also if what `wait` waits for does not happen."""
        with self._changed:
            self._away = False
            self._returns += 1
            self._last = how
            self._changed.notify_all()

    def wait(self, returns: int, seconds: float) -> Return:
        """Wait until the process has reattached once more.

        Parameters
        ----------
        returns : int
            Value of `returns` before the request that makes the process detach.
        seconds : float
            Time limit for the detach; the time until the reattach is not limited here.

        Raises
        ------
        ControlError
            If it does not detach in time.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._returns == returns:
                left = deadline - time.monotonic()
                if not self._away and left <= 0:
                    raise ControlError("The kernel was not asked to leave its session.", "timeout")
                # No timeout while detached: a restored process may have another monotonic clock.
                self._changed.wait(None if self._away else left)
            return self._last


#: The instance of this process.
current = Absence()
os.register_at_fork(after_in_child=current.reset)
