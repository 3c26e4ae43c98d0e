"""A kernel's process, as its kernel manager is to see it: one, whatever becomes of it.

While it is saved and gone, or another one takes its place, it counts as running.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from signal import SIGKILL, SIGTERM

#: Seconds for a killed sandbox to end.
END_SECONDS = 10.0


class Body:
    """A process in a sandbox, or none for a while. For use by several threads.

    Parameters
    ----------
    process : Popen
        The sandbox.
    pid : int
        The kernel's process in it; 0 while there is none.
    """

    def __init__(self, process: subprocess.Popen[bytes], pid: int) -> None:
        self._process: subprocess.Popen[bytes] | None = process
        self.pid = pid
        self._away = False
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return how the kernel has ended; None if it runs, or will run again."""
        with self._lock:
            if self._code is None and self._process is not None and not self._away:
                self._code = self._process.poll()
            return self._code

    def leave(self) -> None:
        """Its end, from now on, is not that of the kernel."""
        with self._lock:
            self._away = True

    def stay(self) -> None:
        """It did not end, after all; or if it did, so did the kernel."""
        with self._lock:
            self._away = False

    def gone(self) -> None:
        """It has ended, and may come back."""
        with self._lock:
            process, self._process = self._process, None
            self.pid = 0
        if process is not None:
            end(process)

    def become(self, process: subprocess.Popen[bytes], pid: int) -> bool:
        """Another process is the kernel's from now on; the one before is ended.

        Returns
        -------
        bool
            False if it is over with the kernel: the other one was ended then.
        """
        with self._lock:
            over = self._code is not None
            unwanted: subprocess.Popen[bytes] | None = process
            if not over:
                unwanted, self._process = self._process, process
                self.pid, self._away = pid, False
        if unwanted is not None:
            end(unwanted)
        return not over

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and what it has started; one that ends it ends all."""
        with self._lock:
            process, away = self._process, self._away
        if number == SIGKILL or (number == SIGTERM and (away or process is None)):
            self.kill()
        elif process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self, code: int = -SIGKILL) -> None:
        """End it. If there is no process now, or it is being saved, it is over at once."""
        with self._lock:
            if self._process is None or self._away:
                self._code = code if self._code is None else self._code
            if self._process is not None:
                self._process.kill()

    def reap(self) -> None:
        """Kill what is left, and wait for its end."""
        self.kill()
        self.gone()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a sandbox and all in it, and wait for its end."""
    process.kill()
    process.wait(END_SECONDS)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
