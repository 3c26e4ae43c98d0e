"""Process of a kernel as its kernel manager sees it: always one, even if it is replaced.

While it is saved and ended, or another one replaces it, it counts as running.
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
    """Process in a sandbox, or none for a while. Thread-safe.

    Parameters
    ----------
    process : Popen
        Process of the sandbox.
    pid : int
        Process id of the kernel in it; 0 while there is none.
    """

    def __init__(self, process: subprocess.Popen[bytes], pid: int) -> None:
        self._process: subprocess.Popen[bytes] | None = process
        self.pid = pid
        self._saved = False
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the kernel's exit status; None if it runs, or will run again."""
        with self._lock:
            if self._code is None and self._process is not None and not self._saved:
                self._code = self._process.poll()
            return self._code

    def leave(self) -> None:
        """From now on, do not take the end of the process for the end of the kernel."""
        with self._lock:
            self._saved = True

    def stay(self) -> None:
        """Undo `leave`: the process continues, or if it has ended, so has the kernel."""
        with self._lock:
            self._saved = False

    def gone(self) -> None:
        """Record that the process has ended, and may be restored."""
        with self._lock:
            process, self._process = self._process, None
            self.pid = 0
        if process is not None:
            end(process)

    def become(self, process: subprocess.Popen[bytes], pid: int) -> bool:
        """Replace the kernel's process by another one, and end the previous one.

        Returns
        -------
        bool
            False if the kernel has ended; then the other process was ended.
        """
        with self._lock:
            over = self._code is not None
            unwanted: subprocess.Popen[bytes] | None = process
            if not over:
                unwanted, self._process = self._process, process
                self.pid, self._saved = pid, False
        if unwanted is not None:
            end(unwanted)
        return not over

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and its children; if it ends the kernel, it ends them all."""
        with self._lock:
            process, saved = self._process, self._saved
        if number == SIGKILL or (number == SIGTERM and (saved or process is None)):
            self.kill()
        elif process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self, code: int = -SIGKILL) -> None:
        """End it. Without a process, or while it is being saved, the kernel ends at once."""
        with self._lock:
            if self._process is None or self._saved:
                self._code = code if self._code is None else self._code
            if self._process is not None:
                self._process.kill()

    def reap(self) -> None:
        """Kill what is left, and wait for its end."""
        self.kill()
        self.gone()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a sandbox with all its processes, and wait for its end."""
    process.kill()
    process.wait(END_SECONDS)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
