"""Jobs in several threads, and locks between processes."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelproxy.common.errors import StoreError

_LOCK_PAUSE_SECONDS = 0.02


class Cancel:
    """Flag with which another thread cancels a job."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Cancel the job at its next chunk."""
        self._event.set()

    def check(self, pause: float = 0.0) -> None:
        """Raise `StoreError` (``cancelled``) if the job is cancelled, now or within `pause` s."""
        if self._event.wait(pause) if pause else self._event.is_set():
            raise StoreError("It was cancelled.", "cancelled")


def work_together(
    threads: int,
    begin: Callable[[], Callable[[], bool]],
    cancel: Cancel,
    on_failure: Callable[[], object] = lambda: None,
) -> None:
    """Run a job step by step in several threads, and return when all have ended.

    Parameters
    ----------
    threads : int
        Number of threads, including this one.
    begin : callable
        Called once in each thread. Returns a function that does one step, and that returns False if
        there was none left.
    cancel : Cancel
        Checked before each step.
    on_failure : callable, optional
        Called after an error, possibly several times. It must wake steps that wait for others.

    Raises
    ------
    BaseException
        The first error of a step; no other step begins after it.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            step = begin()
            while not failures:
                cancel.check()
                if not step():
                    return
        except BaseException as error:
            failures.append(error)
            on_failure()

    helpers = [threading.Thread(target=run, name="sing-store") for _ in range(threads - 1)]
    started: list[threading.Thread] = []
    try:
        for helper in helpers:
            helper.start()
            started.append(helper)
        run()
    except BaseException as error:  # no more threads, or an interrupt: still join those started
        failures.append(error)
        on_failure()
    for helper in started:
        helper.join()
    if failures:
        raise failures[0]


@contextmanager
def file_lock(path: Path, *, shared: bool, seconds: float, cancel: Cancel) -> Iterator[None]:
    """Hold a lock between processes (and threads), which the OS frees when its holder dies.

    Parameters
    ----------
    path : Path
        A file used only for this; created if missing.
    shared : bool
        Hold it shared instead of exclusively.
    seconds : float
        How long to wait for it; 0: not at all.
    cancel : Cancel
        Cancels the wait.

    Raises
    ------
    StoreError
        ``busy`` if others hold it all the time; ``cancelled``.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    # Read-only is enough for a shared lock, and it also works in a store without write permission.
    mode = os.O_RDONLY if shared else os.O_RDWR
    fd = os.open(path, mode | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreError(f"Another process holds {path}: try again.", "busy") from None
                # The OS has no wait for this lock with a timeout and cancellation, so poll.
                cancel.check(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(fd)
