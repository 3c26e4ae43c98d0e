"""Programs under real sessions that train, or hold weights, and are driven step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import (
    CloseSession,
    MigrateRequest,
    OpenSession,
    OpenSessionReply,
    Resume,
    SessionReply,
    StatusReply,
    StatusRequest,
    Suspend,
)
from kernelproxy.common.protocol.views import SessionView
from tests.integration.conftest import lives

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "training" / "steps.py"
WEIGHTS = ROOT / "tests" / "programs" / "training" / "weights.py"


class Program:
    """A program, on ``cpu`` or, with a session, on a proxied ``cuda``."""

    def __init__(self, process: subprocess.Popen[str], session: str = "") -> None:
        self.process, self.session = process, session

    def ask(self, what: int | str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def train(self, steps: int) -> list[str]:
        self.ask(steps)
        return self.answer()

    def do(self, what: str) -> str:
        self.ask(what)
        (answer,) = self.answer()
        return answer


@contextmanager
def program(
    seed: int,
    *,
    proxied: bool,
    device: str | None = None,
    path: Path = PROGRAM,
    user: str = "",
) -> Iterator[Program]:
    """Start a program with one compute thread, and end it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command, session = [str(path), "cpu", str(seed)], ""
    if proxied:
        with agent_client.connect() as agent:
            request = OpenSession(
                f"{path.stem}-{seed}", "", sys.executable, 0, device, True, user=user
            )
            session = agent.expect(OpenSessionReply, request).session
        env |= {"SING_SESSION": session, "SING_SOCKET": str(paths.socket_path())}
        command = ["-m", "kernelproxy.kernel.activation.run_script", str(path), "cuda", str(seed)]
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    try:
        yield Program(process, session)
    finally:
        process.communicate()
        if session:
            with agent_client.connect(start=False) as agent:
                agent.call(CloseSession(session))


def verb(request: Suspend | Resume | MigrateRequest) -> SessionView:
    with agent_client.connect(start=False) as agent:
        return agent.expect(SessionReply, request).session


def status() -> StatusReply:
    with agent_client.connect(start=False) as agent:
        return agent.expect(StatusReply, StatusRequest())


def session_of(program: Program) -> SessionView:
    (found,) = (each for each in status().sessions if each["id"] == program.session)
    return found


def agent_pid() -> int:
    """Return the pid of the current agent."""
    while True:
        with agent_client.connect(start=False) as agent:
            agent.call(StatusRequest())
            pid = agent.daemon_pid  # of the process that listened when this connected
        if lives(pid):
            return pid
