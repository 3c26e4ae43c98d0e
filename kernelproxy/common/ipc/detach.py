"""A process that is without its session for a while, so that it can be saved.

While it is away it has no connection to the daemon: whoever wants one waits till it is back, and it
leaves when those that are open have been closed; those that may be open for long are asked to be
(`Absence.giving_way`). `kernelproxy.kernel.activation.agent_connection` leaves and returns.
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
    """How an absence ended, or a daemon was replaced by another one.

    Parameters
    ----------
    restored : bool
        Whether this is another process than the one that left, made of its images.
    problem : str
        Why the session is lost, for people; "" if it is not.
    """

    restored: bool = False
    problem: str = ""


class GivingWay:
    """Somebody with a connection that he can do without for a while.

    Parameters
    ----------
    let_go : callable
        See `Absence.giving_way`.
    """

    def __init__(self, let_go: Callable[[], object]) -> None:
        self._let_go = let_go
        #: Whether it was asked to let go: then its connection's end is no failure.
        self.asked = False

    def ask(self) -> None:
        """Ask to let go."""
        self.asked = True
        self._let_go()


class Absence:
    """When this process is away, and who wants to know."""

    def __init__(self) -> None:
        #: Says why this process could not come back from an absence; "" if it can.
        self.obstacle: Callable[[], str] = str
        self.reset()

    def reset(self) -> None:
        """Called in a forked child: a lock that another thread held is held for ever there."""
        self._changed = threading.Condition()
        self._away = False
        self._connecting = 0
        self._open: weakref.WeakSet[object] = weakref.WeakSet()
        self._giving_way: set[GivingWay] = set()
        self._returns = 0
        self._last = Return()

    @property
    def returns(self) -> int:
        """How often it has returned; for `wait`."""
        return self._returns

    @property
    def restored(self) -> bool:
        """Whether this is another process than the one that left last."""
        return self._last.restored

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Around the making of a connection: waits while the process is away."""
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
        """Count a connection."""
        with self._changed:
            self._open.add(control)

    def note_closed(self, control: object) -> None:
        """Count it no more; doing it twice is no error."""
        with self._changed:
            self._open.discard(control)
            self._changed.notify_all()

    @contextlib.contextmanager
    def giving_way(self, let_go: Callable[[], object]) -> Iterator[GivingWay]:
        """While somebody has a connection that must not keep the process from leaving.

        Parameters
        ----------
        let_go : callable
            Called when the process is to leave, in another thread; ends the connection soon, such
            as `Control.abort`. It may neither wait nor open or close one itself.
        """
        there = GivingWay(let_go)
        with self._changed:
            self._giving_way.add(there)
            if self._away:  # since the connection was made
                there.ask()
        try:
            yield there
        finally:
            with self._changed:
                self._giving_way.discard(there)

    def begin(self, seconds: float) -> None:
        """Go away as soon as there is no connection.

        Raises
        ------
        ControlError
            If that takes longer than `seconds`, or there is an obstacle; then the process is not
            away.
        """
        if why := self.obstacle():
            raise ControlError(why, "unavailable")
        deadline = time.monotonic() + seconds
        with self._changed:
            self._away = True
            self._changed.notify_all()
            for each in self._giving_way:
                each.ask()
            while self._connecting or self._open:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._away = False
                    self._changed.notify_all()
                    raise ControlError(
                        "The notebook is waiting for the jupyter_sing daemon.", "busy"
                    )
                # One that nobody closed may be collected without a word.
                self._changed.wait(min(left, 0.05))

    def end(self, how: Return) -> None:
        """Be there again; also to be called if what `wait` waits for does not come."""
        with self._changed:
            self._away = False
            self._returns += 1
            self._last = how
            self._changed.notify_all()

    def wait(self, returns: int, seconds: float) -> Return:
        """Wait until the process has returned once more.

        Parameters
        ----------
        returns : int
            `returns` before whatever makes it leave was asked for.
        seconds : float
            How long it may take till it leaves; how long it is away is up to others.

        Raises
        ------
        ControlError
            If it does not leave.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._returns == returns:
                left = deadline - time.monotonic()
                if not self._away and left <= 0:
                    raise ControlError("The kernel was not asked to leave its session.", "timeout")
                # A time to wait for would be one of the clock of then, in a restored process.
                self._changed.wait(None if self._away else left)
            return self._last


#: Of this process.
current = Absence()
os.register_at_fork(after_in_child=current.reset)
