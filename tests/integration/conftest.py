"""A real daemon with toy workers, in a runtime directory of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelproxy import control
from kernelproxy.errors import ControlError
from kernelproxy.protocol import OpenSession, SessionOpened, Status, StatusReply, Stop
from tests.doubles.client import ToyClient

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class ToyHost:
    """A daemon process and what a test asks of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.clients: list[ToyClient] = []

    def call(self, request, timeout: float = 30.0):
        with control.connect(start=False) as connection:
            return connection.call(request, timeout)

    def open(self, name: str = "toy", **fields) -> str:
        with control.connect(start=False) as connection:
            request = OpenSession(name, "kernel", sys.executable, **fields)
            return connection.expect(SessionOpened, request, 30.0).session

    def client(self, name: str = "toy", **fields) -> ToyClient:
        client = ToyClient(self.open(name, **fields))
        self.clients.append(client)
        return client

    def status(self) -> StatusReply:
        return self.call(Status())

    def session(self, client: ToyClient) -> dict:
        (found,) = (each for each in self.status().sessions if each["id"] == client.session)
        return found

    def when(self, client: ToyClient, state: str) -> dict | None:
        """The session, if it is in that state."""
        found = self.session(client)
        return found if found["state"] == state else None

    def kill_worker(self, client: ToyClient) -> bool:
        """Kill the session's worker; return whether there was one."""
        worker = self.session(client)["worker_pid"]
        try:
            os.kill(worker or 0x7FFFFFFF, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def bells_were_heard(self, client: ToyClient) -> bool:
        """Whether the agent has looked at the pages since the client last rang."""
        return client.agent.bell != client.rung

    def fds(self) -> list[str]:
        directory = Path(f"/proc/{self.process.pid}/fd")
        targets = (os.readlink(each) for each in directory.iterdir())
        return sorted(re.sub(r"[0-9]+", "N", target) for target in targets)

    def children(self) -> list[int]:
        """Processes of the daemon's family, zygotes and workers."""
        found, ask = [], [self.process.pid]
        while ask:
            pid = ask.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                ask += [int(each) for each in task.read_text().split()]
            found.append(pid)
        return found[1:]


def wait_until(condition, seconds: float = 20.0):
    """Wait for what nobody announces, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return value


def from_outside(request) -> None:
    """Make a request from another process than the kernel's."""
    program = (
        "from kernelproxy import control, protocol\n"
        f"with control.connect(start=False) as c: c.call(protocol.{request!r}, 30)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.fixture
def toy_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ToyHost]]:
    """Start the one daemon of a test, with settings; it must end by itself when told to."""
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("SING_SOCKET", raising=False)
    hosts: list[ToyHost] = []

    def start(devices: str = "cpu:1GiB@1", **settings) -> ToyHost:
        ready, write_end = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_SING_DEVICES": devices}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.doubles.daemon", str(write_end), json.dumps(settings)],
            pass_fds=(write_end,),
            env=environment,
        )
        os.close(write_end)
        said = os.read(ready, 1000)
        os.close(ready)
        assert said == b"ready\n"
        hosts.append(ToyHost(process))
        return hosts[-1]

    yield start
    for host in hosts:
        for client in host.clients:
            client.close()
        try:
            host.call(Stop())
        except ControlError as error:  # the test ended it
            assert error.reason == "no-daemon"  # noqa: PT017
        assert host.process.wait(30) == 0
