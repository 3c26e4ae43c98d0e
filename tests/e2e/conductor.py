"""Ranks that do what a test tells them, whatever has started them: see ``conducted.py``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.doubles.free_ports import free_ports
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX
from tests.integration.conftest import children_of

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "jobs" / "conducted.py"
#: Ranks are ready after a tenth of it. Shorter than the limit of a test, which shows no stacks.
READY_SECONDS_MAX = 80.0


@dataclass
class ConductedRank:
    """A rank that waits for commands."""

    number: int
    pid: int
    session: str
    restarts: int
    _lines: TextIO

    def tell(self, command: str) -> None:
        """Let it begin a command."""
        self._lines.write(f"{command}\n")
        self._lines.flush()

    def answer(self) -> str:
        """Return its answer to the command; "": its process has ended."""
        with contextlib.suppress(ConnectionResetError):
            return self._lines.readline().rstrip()
        return ""

    def do(self, command: str) -> str:
        """Tell it a command, and return the answer."""
        self.tell(command)
        return self.answer()


class Conductor:
    """The end to which the ranks of one job report.

    Parameters
    ----------
    path : Path
        Of the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(READY_SECONDS_MAX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections = contextlib.ExitStack()

    def ranks(self, count: int) -> list[ConductedRank]:
        """Wait until so many ranks are ready; return them in their order."""
        found: list[ConductedRank] = []
        try:
            while len(found) < count:
                found.append(self._accept())
        except TimeoutError:
            text = f"{len(found)} of {count} ranks are ready; stacks of all processes:\n"
            raise TimeoutError(text + self._stacks()) from None
        return sorted(found, key=lambda rank: rank.number)

    def _stacks(self) -> str:
        """Return where the processes of the test are: see ``conducted.show_stacks``."""
        found = Path(f"{self.path}.stacks")
        found.touch()
        for pid in filter(_shows_stacks, _descendants(os.getpid())):
            before = found.stat().st_size
            with contextlib.suppress(AssertionError, ProcessLookupError):  # it is stopped, or ends
                os.kill(pid, signal.SIGUSR2)
                wait_until(lambda: found.stat().st_size > before, 5)  # noqa: B023
        return found.read_text()

    def _accept(self) -> ConductedRank:
        connection, _ = self._listener.accept()
        self._connections.enter_context(connection)
        connection.settimeout(SECONDS_MAX)
        lines = self._connections.enter_context(connection.makefile("rw"))
        number, session, restarts = lines.readline().split()
        # Its own number of itself may be another one: kernels may have namespaces.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        (pid,) = struct.unpack_from("i", credentials)
        return ConductedRank(int(number), pid, session, int(restarts), lines)

    def dismiss(self) -> None:
        """Let the ranks end, as programs that are done."""
        self._connections.close()
        self._connections = contextlib.ExitStack()

    def close(self) -> None:
        """End the socket."""
        self.dismiss()
        self._listener.close()

    # ------------------------------------------------------------ ways to start ranks in a cell

    def torchrun(self, count: int, *options: str) -> str:
        """Return a cell that starts ranks by torchrun, and says how that has ended."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(count), *options, str(PROGRAM), str(self.path)]
        return (
            "import subprocess\n"
            f"done = subprocess.run({command!r}, stderr=subprocess.PIPE, text=True)\n"
            "print('status', done.returncode, done.stderr[-6000:])"
        )

    def spawn(self, count: int) -> str:
        """Return a cell that starts ranks by torch.multiprocessing."""
        arguments = (str(self.path), count, str(free_ports(1)[0]))
        return (
            f"import sys, torch; sys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.programs.jobs.conducted import spawned\n"
            f"torch.multiprocessing.spawn(spawned, {arguments!r}, nprocs={count})"
        )

    def notebook_launcher(self, count: int) -> str:
        """Return a cell that starts ranks by Accelerate's launcher, which forks."""
        port = str(free_ports(1)[0])
        return (
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from accelerate import notebook_launcher\n"
            "from tests.programs.jobs.conducted import main, show_stacks\n"
            f"show_stacks({str(self.path)!r})\n"
            f"notebook_launcher(main, ({str(self.path)!r},), num_processes={count}, "
            f"use_port={port!r})"
        )


def _shows_stacks(pid: int) -> bool:
    """Return whether a process handles the signal, which would end another one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)


def _descendants(pid: int) -> list[int]:
    return [each for child in children_of(pid) for each in (child, *_descendants(child))]


@contextlib.contextmanager
def conductor(directory: Path) -> Iterator[Conductor]:
    """Listen for ranks at a socket in a directory."""
    made = Conductor(directory / "ranks")
    try:
        yield made
    finally:
        made.close()
