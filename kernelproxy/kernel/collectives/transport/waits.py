"""The waits of a rank for its peers, during which a device that it shares with them executes them.

Asynchronous collectives wait for peers in threads of their own, while the program issues further
operators. A rank that gave up its turn then would keep all its activations.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
from collections.abc import Callable, Iterator

from kernelproxy.kernel.activation import state


class Waiting(enum.IntEnum):
    """Of a rank for its peers; the values are those of ``ClientPage.awaiting_peers``."""

    none = 0
    background = 1
    """A thread waits, but the program may continue."""
    program = 2
    """The program waits, too."""


class BackgroundThread(threading.Thread):
    """A thread that executes collectives while the program continues."""


class Waits:
    """The waits of a rank's threads; thread-safe.

    Parameters
    ----------
    report : callable
        Called with each new state, while a lock is held.
    """

    def __init__(self, report: Callable[[Waiting], object] = lambda waiting: None) -> None:
        self._report = report
        self.reset()

    def reset(self) -> None:
        """Forget all threads: this is a new process."""
        self._lock = threading.Lock()
        self._peers = 0
        self._program = 0
        self._running = 0
        self._ended = False
        self._state = Waiting.none

    @contextlib.contextmanager
    def for_peers(self) -> Iterator[None]:
        """While the calling thread waits for peers."""
        background = isinstance(threading.current_thread(), BackgroundThread)
        self._change(peers=1, program=not background)
        try:
            yield
        finally:
            self._change(peers=-1, program=-(not background))

    @contextlib.contextmanager
    def for_collectives(self) -> Iterator[None]:
        """While the program waits until collectives are complete."""
        self._change(program=1)
        try:
            yield
        finally:
            self._change(program=-1)

    def begin(self) -> None:
        """Note that an asynchronous collective is to be executed; `complete` ends it."""
        self._change(running=1)

    def complete(self) -> None:
        """Note that a collective is about to be completed."""
        self._change(running=-1)

    def end_backward(self) -> None:
        """Note that a backward pass ends, whose asynchronous collectives the program waits for."""
        with self._lock:
            self._ended = self._running > 0
            self._update()

    def _change(self, *, peers: int = 0, program: int = 0, running: int = 0) -> None:
        with self._lock:
            self._peers += peers
            self._program += program
            self._running += running
            self._ended = self._ended and self._running > 0
            self._update()

    def _update(self) -> None:
        found = Waiting.none
        if self._peers > 0:
            ends = self._program > 0 or self._ended
            found = Waiting.program if ends else Waiting.background
        if found != self._state:
            self._state = found
            self._report(found)


#: Those of this process.
waits = Waits(state.await_peers)
os.register_at_fork(after_in_child=waits.reset)
