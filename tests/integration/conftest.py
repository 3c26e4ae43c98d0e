"""Fixtures: a real daemon with toy workers, in a runtime directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common import paths
from kernelproxy.common.errors import ProcessError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import (
    Message,
    OpenSession,
    OpenSessionReply,
    StatusReply,
    StatusRequest,
)
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.shared_memory import close_all
from kernelproxy.criu import mode_probe as forms
from tests.conftest import stop_daemon
from tests.doubles.session.client import WAIT_SECONDS, ToyClient
from tests.doubles.waiting import wait_until

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class ToyHost:
    """A daemon process, and what a test needs of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.was_killed = False
        self.clients: list[ToyClient] = []

    def call(self, request: Message, timeout: float = WAIT_SECONDS) -> Any:
        with agent_client.connect(start=False) as connection:
            reply, fds = connection.last(request, timeout)
            close_all(fds)
            return reply

    def open(self, name: str = "toy", **fields: Any) -> str:
        with agent_client.connect(start=False) as connection:
            request = OpenSession(name, fields.pop("kernel_id", "kernel"), sys.executable, **fields)
            return connection.expect(OpenSessionReply, request, WAIT_SECONDS).session

    def client(self, name: str = "toy", **fields: Any) -> ToyClient:
        client = ToyClient(self.open(name, **fields))
        self.clients.append(client)
        return client

    def work(self, client: ToyClient, memory: int = 0) -> SessionView:
        """Let a client use memory and change its state; return its session, which is idle then."""
        client.use(memory)
        client.add(1)
        assert client.read() == client.state
        return self.rested(client)

    def hold(self, client: ToyClient, until: Path) -> None:
        """Append a record that executes until this file exists; return when it is being executed.

        A session that is only "running" may end its turn before that record.
        """
        client.append(f"wait {until}")
        wait_until(until.with_name(f"{until.name}.begun").exists)

    def rested(self, client: ToyClient) -> SessionView:
        """Wait until a session is idle: its worker stays busy for a moment after an answer."""
        return wait_until(lambda: self.when(client, "idle"))

    def status(self) -> StatusReply:
        reply: StatusReply = self.call(StatusRequest())
        return reply

    def session(self, client: ToyClient) -> SessionView:
        (found,) = (each for each in self.status().sessions if each["id"] == client.session)
        return found

    def when(self, client: ToyClient, state: str) -> SessionView | None:
        """Return the session if it is in that state."""
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

    def bells_were_received(self, client: ToyClient) -> bool:
        """True if the agent has read the pages since the client last rang."""
        return client.agent.bell != client.rung

    def agent_pid(self) -> int:
        """Return the pid of the current agent."""
        while True:
            with agent_client.connect(start=False) as connection:
                connection.call(StatusRequest(), WAIT_SECONDS)
                pid = connection.daemon_pid  # of the process that listened when this connected
            if lives(pid):
                return pid

    def supervisor_pid(self) -> int:
        """Return the pid of the supervisor, which is the agent's child or parent."""
        return supervisor_of(self.agent_pid())

    def kill(self, *pids: int) -> None:
        """Kill processes at the same time, and wait until they have ended."""
        kill_at_once(*pids)
        self.was_killed |= self.process.pid in pids

    def end(self) -> None:
        """Stop it; it must exit by itself, and all processes that it started with it."""
        for client in self.clients:
            client.close()
        self.clients.clear()
        stop_daemon(paths.runtime_dir())
        assert self.process.wait(WAIT_SECONDS) == (-signal.SIGKILL if self.was_killed else 0)

    def kill_agent(self) -> None:
        self.kill(self.agent_pid())

    def fds(self) -> list[str]:
        found = []
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since: that of our last request
                found.append(re.sub(r"[0-9]+", "N", os.readlink(each)))
        return sorted(found)

    def children(self) -> list[int]:
        """Return the zygotes and workers of the agent."""
        found, ask = [], children_of(self.agent_pid())
        while ask:
            pid = ask.pop()
            ask += children_of(pid)
            if not is_supervisor(pid):
                found.append(pid)
        return found


def run_state(pid: int) -> str:
    """Return a process's state as a letter, see proc(5); "" if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def lives(pid: int) -> bool:
    """True if a process exists and has not ended."""
    return run_state(pid) not in ("", "Z")


def kill_at_once(*pids: int) -> None:
    """Kill processes before any of them notices the end of another; wait until they have ended."""
    fds = [os.pidfd_open(pid) for pid in pids]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for fd in fds:
            signal.pidfd_send_signal(fd, number)
    for fd in fds:
        assert select.select([fd], [], [], WAIT_SECONDS)[0]
        os.close(fd)


def supervisor_of(agent: int) -> int:
    """Return the supervisor of an agent: its parent or its child."""
    # Right after its start it still has the agent's command line, or none.
    return wait_until(
        lambda: next(filter(is_supervisor, [parent_of(agent), *children_of(agent)]), 0)
    )


def is_supervisor(pid: int) -> bool:
    return b"kernelproxy.agent.supervisor.supervisor" in command_of(pid)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += [int(each) for each in task.read_text().split()]
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def from_outside(request: Message) -> None:
    """Send a request from another process than the kernel's."""
    program = (
        "from kernelproxy.common.ipc import agent_client as control\n"
        "from kernelproxy.common import protocol\n"
        f"with control.connect(start=False) as c: c.call(protocol.{request!r}, {WAIT_SECONDS})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.fixture
def toy_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ToyHost]]:
    """Start the one daemon of a test, with settings; it must exit by itself when it is stopped."""
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("SING_SOCKET", raising=False)
    hosts: list[ToyHost] = []

    def start(devices: str = "cpu:1GiB@1", **settings: Any) -> ToyHost:
        ready, write_end = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_SING_DEVICES": devices}
        log = os.open(settings.pop("log"), os.O_WRONLY | os.O_APPEND) if "log" in settings else None
        environment["TOY_KILLS"] = settings.pop("kills", "")
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.doubles.daemon.daemon",
                str(write_end),
                json.dumps(settings),
            ],
            pass_fds=(write_end,),
            env=environment,
            stderr=log,
        )
        close_all([log] if log is not None else [])
        os.close(write_end)
        said = os.read(ready, 1000)
        os.close(ready)
        assert said == b"ready\n"
        hosts.append(ToyHost(process))
        return hosts[-1]

    yield start
    for host in hosts:
        host.end()


@pytest.fixture(scope="session")
def criu_program() -> str:
    """Return CRIU's path; skip if there is none, unless one was named for these tests."""
    try:
        return forms.find_criu()
    except ProcessError as error:
        if forms.VARIABLE in os.environ:
            raise
        pytest.skip(str(error))
