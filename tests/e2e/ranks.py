"""Jobs of several ranks, each a program under its own session, as a launcher starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import StatusReply, StatusRequest
from tests.doubles.free_ports import free_ports
from tests.doubles.session.client import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs" / "collectives"


class RankProcesses:
    """A running job.

    Parameters
    ----------
    ranks : list of Popen
        Their processes.
    errors : list of Path
        What each has written as errors.
    """

    def __init__(self, ranks: list[subprocess.Popen[str]], errors: list[Path]) -> None:
        self.ranks, self._errors = ranks, errors

    def line(self, rank: int) -> str:
        """Return the next line of a rank's output; a rank that has failed fails the test."""
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            self.outputs()
        return line.rstrip()

    def outputs(self) -> list[list[str]]:
        """Wait for the ends of all ranks; return the rest of their outputs, by lines."""
        found = []
        for each in self.ranks:
            # `communicate` would lose what `readline` has read beyond its line.
            assert each.stdin is not None
            assert each.stdout is not None
            each.stdin.close()
            found.append(each.stdout.read().splitlines())
            each.wait(4 * WAIT_SECONDS)
        for rank, (each, errors) in enumerate(zip(self.ranks, self._errors, strict=True)):
            if each.returncode:
                pytest.fail(f"rank {rank}: {each.returncode}\n{errors.read_text()[-4000:]}")
        return found


@contextlib.contextmanager
def job(
    ranks: int, program: str, *arguments: str, directory: Path, device: str = ""
) -> Iterator[RankProcesses]:
    """Start a job, perhaps with all its ranks on one device; end what is left of it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    options = ["--device", device] if device else []
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", *options]
    command += [str(PROGRAMS / program), *arguments]
    with contextlib.ExitStack() as stack:
        started, errors = list[subprocess.Popen[str]](), list[Path]()
        for rank in range(ranks):
            errors.append(directory / f"errors-{rank}")
            process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(errors[-1].open("w")),
                text=True,
                start_new_session=True,
            )
            started.append(stack.enter_context(process))
            stack.callback(signal_rank, process, signal.SIGKILL)
        yield RankProcesses(started, errors)


def signal_rank(rank: subprocess.Popen[str], number: int) -> None:
    """Send a signal to a rank and to what started it, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, number)


def kill_workers() -> int:
    """Kill the workers of all sessions; return how many there were."""
    killed = 0
    with agent_client.connect(start=False) as connection:
        reply = connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
    for session in reply.sessions:
        if session["worker_pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(session["worker_pid"], signal.SIGKILL)
                killed += 1
    return killed
