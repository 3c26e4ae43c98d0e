"""Real workers: killed at any moment, and as many as a machine should carry."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kernelproxy import control, paths
from kernelproxy.protocol import (
    CloseSession,
    OpenSession,
    Resume,
    SessionOpened,
    SessionReply,
    Status,
    StatusReply,
    Suspend,
)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "steps.py"
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


class Program:
    """A training program, on ``cpu`` or, with a session, on a proxied ``cuda``."""

    def __init__(self, process: subprocess.Popen[str], session: str = "") -> None:
        self.process, self.session = process, session

    def ask(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def train(self, steps: int) -> list[str]:
        self.ask(steps)
        return self.answer()


@contextmanager
def program(seed: int, *, proxied: bool) -> Iterator[Program]:
    """Start a program with one compute thread, and end it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command, session = [str(PROGRAM), "cpu", str(seed)], ""
    if proxied:
        with control.connect() as agent:
            request = OpenSession(f"steps-{seed}", "", sys.executable, 0, None, True)
            session = agent.expect(SessionOpened, request).session
        env |= {"SING_SESSION": session, "SING_SOCKET": str(paths.socket_path())}
        command = ["-m", "kernelproxy.activation.script", str(PROGRAM), "cuda", str(seed)]
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
            with control.connect(start=False) as agent:
                agent.call(CloseSession(session))


def verb(request: Suspend | Resume) -> dict[str, Any]:
    with control.connect(start=False) as agent:
        return agent.expect(SessionReply, request).session


def status() -> StatusReply:
    with control.connect(start=False) as agent:
        return agent.expect(StatusReply, Status())


def daemon_fds() -> int:
    with control.connect(start=False) as agent:
        return len(os.listdir(f"/proc/{agent.daemon_pid}/fd"))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:2GiB@1,cpu:2GiB@1")


@pytest.mark.usefixtures("one_thread")
def test_ten_kills_and_a_suspension_change_no_loss() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    steps = 600
    with program(0, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        expected = plain.train(steps)
    with program(0, proxied=True) as proxied:
        assert proxied.answer() == ["ready"]
        killed: set[int] = set()
        done = threading.Event()

        def kill() -> None:
            while len(killed) < 10 and not done.wait(chance.uniform(0, 0.3)):
                (session,) = status().sessions
                worker = session["worker_pid"]
                if worker is None or worker in killed:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed.add(worker)
                if len(killed) == 5:
                    assert verb(Suspend(proxied.session))["worker_pid"] is None
                    assert verb(Resume(proxied.session))["worker_pid"] is not None

        killer = threading.Thread(target=kill)
        killer.start()
        got = []
        while len(killed) < 10 or len(got) < steps:
            got += proxied.train(20)
        done.set()
        killer.join()
    assert len(killed) == 10
    if len(got) > steps:
        with program(0, proxied=False) as plain:
            assert plain.answer() == ["ready"]
            expected = plain.train(len(got))
    assert got == expected, f"seed {seed}"


@pytest.mark.usefixtures("one_thread")
def test_sixty_four_sessions_are_resident_suspended_and_resumed_without_a_leak() -> None:
    count, at_once = 64, 8
    with control.connect():  # the daemon and, by the first program, the zygote are there
        pass
    with program(0, proxied=True) as first:
        assert first.answer() == ["ready"]
        first.train(1)
    wait_until(lambda: not status().sessions)
    fds = daemon_fds()
    with program(0, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        expected = [plain.train(3) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        programs: list[Program] = []
        for begin in range(0, count, at_once):
            batch = [stack.enter_context(program(0, proxied=True)) for _ in range(at_once)]
            for each in batch:
                assert each.answer() == ["ready"], begin
            programs += batch
        for each in programs:
            each.ask(3)
        assert [each.answer() for each in programs] == [expected[0]] * count
        sessions = status().sessions
        workers = {each["worker_pid"] for each in sessions}
        assert len(workers - {None}) == count
        for each in programs:
            suspended = verb(Suspend(each.session))
            assert (suspended["state"], suspended["memory"]) == ("suspended", 0)
        assert sum(each["memory_used"] for each in status().devices) == 0
        assert not any(lives(worker) for worker in workers)
        for each in programs:
            verb(Resume(each.session))
        for each in programs:
            each.ask(3)
        assert [each.answer() for each in programs] == [expected[1]] * count
        assert len({each["worker_pid"] for each in status().sessions} - {None}) == count
    wait_until(lambda: not status().sessions)
    wait_until(lambda: daemon_fds() <= fds)


def lives(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds: float = 30.0) -> None:
    """Wait for what nobody announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
