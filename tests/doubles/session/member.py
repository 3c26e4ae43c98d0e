"""A process with torch that executes commands of its test: tests/programs/member.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kernelproxy.criu import sandbox
from kernelproxy.criu.sandbox import Form
from tests.doubles.daemon.agent import OneKernelAgent
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
MEMBER = ROOT / "tests" / "programs" / "member.py"


class Process:
    """Process with torch whose session belongs to an agent double, optionally in a sandbox."""

    def __init__(
        self, directory: Path, seconds: float = WAIT_SECONDS, form: Form | None = None
    ) -> None:
        self.fifo, self.answers = directory / "commands", directory / "answers"
        os.mkfifo(self.fifo, 0o600)
        self.answers.touch()
        self.count = 0
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SING_BUNDLE": str(ROOT),
            "SING_SESSION": "first",
            "SING_SOCKET": str(directory / "agent.sock"),
            "OMP_NUM_THREADS": "1",
        }
        reader, writer = os.pipe()
        prefix = [] if form is None else sandbox.prefix(form, writer)
        with (directory / "output").open("wb") as output:
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, MEMBER, self.fifo, self.answers, str(seconds)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                start_new_session=True,
                env=environment,
            )
        os.close(writer)
        self.pid = self.popen.pid if form is None else sandbox.read_pid(reader, WAIT_SECONDS)
        os.close(reader)

    def tell(self, line: str) -> None:
        with self.fifo.open("w") as commands:
            commands.write(line + "\n")

    def answer(self) -> str:
        def another() -> list[str] | None:
            assert self.popen.poll() is None, "it has ended"
            lines = self.answers.read_text().splitlines()
            return lines if len(lines) > self.count else None

        lines: list[str] = wait_until(another)
        self.count += 1
        return lines[self.count - 1]

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def open_to_the_outside(self) -> list[str]:
        """Return its sockets and memfds: what connects it to other processes."""
        found = []
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(fd))
        mapped = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return [
            text for text in (*found, *mapped) if text.startswith("socket:") or "/memfd:" in text
        ]


@contextlib.contextmanager
def running(process: Process, agent: OneKernelAgent) -> Iterator[Process]:
    try:
        assert process.answer() == "ready"
        assert agent.hellos.get(timeout=WAIT_SECONDS).session == "first"
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()
