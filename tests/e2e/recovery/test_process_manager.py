"""Real kernels whose process is replaced at the orders of a fake agent, and what clients notice."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from kernelproxy.common import protocol
from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import mode_probe as forms
from kernelproxy.criu.sandbox import Form, Kind
from tests.e2e.kernels import Kernel, kernel
from tests.e2e.notebooks.test_server import Server, disconnect
from tests.unit.fake_daemon import FakeAgent, FakeDaemon

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECONDS_MAX = 60.0
KINDS: list[Kind] = ["root", "user"] if os.geteuid() == 0 else ["user"]
each_form = pytest.mark.parametrize("form", KINDS, indirect=True)
# A pipe that wakes the kernel, and state that only its process has.
SETUP = """
import itertools, os, select
wait, wake = os.pipe()
def woken():
    ready = select.select([wait], [], [], 0)[0]
    return os.read(wait, 1 << 16).decode() if ready else ""
counter = itertools.count(1)
get_ipython().history_manager.enabled = False  # which all kernels of a user share
print(wake)
"""
# What a kernel does before another process takes its place.
STEP_ASIDE = """
import signal, threading
go = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: go.set())
print("waits", flush=True)
_ = go.wait()
get_ipython().events.register("pre_execute", threading.Event().wait)
"""
# A server that starts a kernel, and dies without ending it.
SERVER = """
import os
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="python3")
manager.start_kernel()
print(manager.provisioner.pid, manager.connection_file, flush=True)
input()
os._exit(9)
"""


@pytest.fixture
def form(request: pytest.FixtureRequest) -> Form:
    """Return the best form for this user, or the one of the parameter."""
    try:
        return Form(getattr(request, "param", KINDS[0]), forms.find_criu())
    except ProcessError as error:
        if forms.VARIABLE in os.environ:
            raise
        pytest.skip(str(error))


@pytest.fixture
def daemon(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, form: Form) -> Iterator[FakeDaemon]:
    """A fake daemon that can save processes."""
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    (runtime_dir / "start.lock").touch()
    daemon = FakeDaemon(runtime_dir / "agent.sock")
    daemon.form = ({"kind": form.kind, "criu": form.criu}, "")
    try:
        yield daemon
    finally:
        daemon.close()


class ManagedKernel:
    """A kernel, its agent, and the directories of its images."""

    def __init__(self, notebook: Kernel, daemon: FakeDaemon, directory: Path) -> None:
        self.notebook, self.daemon = notebook, daemon
        self.agent: FakeAgent = daemon.managers.get(timeout=SECONDS_MAX)
        self._directory, self._count = directory, 0
        self.wake_fd = int(notebook.run(SETUP).stdout)

    def order(self, message: protocol.Message) -> protocol.Message:
        """Send an order, which must succeed."""
        answer = self.agent.order(message)
        assert not isinstance(answer, protocol.Error), answer.message
        return answer

    def save(self, *, leave_running: bool) -> Path:
        """Save the process; return the directory of its images."""
        self._count += 1
        directory = self._directory / f"images-{self._count}"
        dump = protocol.Dump(str(directory), self.wake_fd, leave_running)
        assert isinstance(self.order(dump), protocol.Dumped)
        return directory

    def hibernate(self) -> Path:
        self.order(protocol.HoldRequests(SECONDS_MAX))
        return self.save(leave_running=False)

    def revive(self, directory: Path) -> None:
        revived = self.order(protocol.Revive(str(directory), "s0", beside=False))
        assert isinstance(revived, protocol.Revived)
        assert Path("/proc", str(revived.pid)).exists()
        self.order(protocol.LetThrough())


@contextmanager
def watched(pid: int) -> Iterator[Callable[[], bool]]:
    """Yield a function that waits for the end of a process."""
    fd = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([fd], [], [], SECONDS_MAX)[0])
    finally:
        os.close(fd)


def resume_process(pid: int) -> None:
    """Let a kernel continue that has stepped aside."""
    os.kill(pid, signal.SIGUSR1)


@contextmanager
def managed_kernel(daemon: FakeDaemon, directory: Path) -> Iterator[ManagedKernel]:
    with kernel() as notebook:
        yield ManagedKernel(notebook, daemon, directory)


@each_form
def test_a_kernel_detaches_and_reattaches_and_its_client_keeps_its_state(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        for number in range(1, 4):
            images = one.hibernate()
            assert one.notebook.manager.is_alive()
            cells = [one.notebook.begin("print(next(counter))") for _ in range(20)]
            assert one.agent.hear() == protocol.Knock()
            one.revive(images)
            printed = [one.notebook.finish(cell).stdout for cell in cells]
            assert printed == [f"{20 * (number - 1) + i}\n" for i in range(1, 21)]
            told = json.loads(one.notebook.run("print(woken(), end='')").stdout)
            told.pop("ports", None)  # of its own, if another program has taken one meanwhile
            assert told == {"restored": True, "session": "s0"}


@each_form
def test_input_and_interrupts_reach_the_current_process(daemon: FakeDaemon, tmp_path: Path) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        one.revive(one.hibernate())
        client = one.notebook.client
        cell = client.execute("print(input() * 2)", allow_stdin=True)
        assert client.get_stdin_msg(timeout=SECONDS_MAX)["msg_type"] == "input_request"
        client.input("ab")
        assert one.notebook.finish(cell).stdout == "abab\n"
        for mode in ("signal", "message"):
            assert one.notebook.manager.kernel_spec is not None
            one.notebook.manager.kernel_spec.interrupt_mode = mode
            cell = one.notebook.begin("import time\nprint('on', flush=True)\ntime.sleep(600)")
            one.notebook.finish(cell, until=lambda ran: "on" in ran.stdout)
            one.notebook.manager.interrupt_kernel()
            assert one.notebook.finish(cell).error == "KeyboardInterrupt"


def test_a_process_that_cannot_be_saved_continues(
    daemon: FakeDaemon, runtime_dir: Path, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        outside = str(runtime_dir / "agent.sock")
        one.notebook.run(
            f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({outside!r})"
        )
        one.order(protocol.HoldRequests(SECONDS_MAX))
        answer = one.agent.order(protocol.Dump(str(tmp_path / "images"), one.wake_fd, False))
        assert isinstance(answer, protocol.Error)
        one.order(protocol.LetThrough())
        line = '{"restored": false, "session": "s0"}\n'
        assert one.notebook.run("s.close()\nprint(woken(), end='')").stdout == line
        one.revive(one.hibernate())
        assert one.notebook.run("print(next(counter))").stdout == "1\n"


@each_form
def test_an_earlier_process_takes_the_place_of_the_present_one(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        notebook = one.notebook
        images = one.save(leave_running=True)
        assert notebook.run("later = 1").error == ""
        for session in ("s2", "s3", "s4"):
            # As a kernel does that has requested it: it ends its cell, and starts no other one.
            last = notebook.begin(STEP_ASIDE)
            notebook.finish(last, until=lambda ran: "waits" in ran.stdout)
            cells = [notebook.begin("print(next(counter), 'later' in dir())") for _ in range(20)]
            revived = one.order(protocol.Revive(str(images), session, beside=True))
            assert isinstance(revived, protocol.Revived)
            assert notebook.manager.provisioner is not None
            present = asyncio.run(notebook.manager.provisioner.get_provisioner_info())["pid"]
            late = notebook.begin("print(woken())")
            resume_process(present)
            one.order(protocol.Replace())
            printed = [notebook.finish(cell).stdout for cell in cells]
            assert printed == [f"{number} False\n" for number in range(1, 21)]
            line = json.loads(notebook.finish(late).stdout)
            assert (line["restored"], line["session"]) == (True, session)
            assert Path(line["connection_file"]).name == Path(notebook.manager.connection_file).name
        assert [r.session for r in daemon.requests if isinstance(r, protocol.Tend)] == ["s0"]
    assert daemon.requests[-1] == protocol.CloseSession("s4")


def test_a_process_not_allowed_to_replace_the_kernel_is_ended(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        images = one.save(leave_running=True)
        one.notebook.run("later = 1")
        revived = one.order(protocol.Revive(str(images), "s2", beside=True))
        assert isinstance(revived, protocol.Revived)
        with watched(revived.pid) as ended:
            one.order(protocol.LetThrough())
            assert ended()
        assert one.notebook.run("print(later)").stdout == "1\n"


def test_an_accepted_replacement_completes_although_the_agent_has_died(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        notebook = one.notebook
        images = one.save(leave_running=True)
        notebook.run("later = 1")
        last = notebook.begin(STEP_ASIDE)
        notebook.finish(last, until=lambda ran: "waits" in ran.stdout)
        cells = [notebook.begin("print(next(counter), 'later' in dir())") for _ in range(3)]
        one.order(protocol.Revive(str(images), "s2", beside=True))
        one.order(protocol.CommitReplace())
        assert notebook.manager.provisioner is not None
        present = asyncio.run(notebook.manager.provisioner.get_provisioner_info())["pid"]
        one.agent.close()
        resume_process(present)
        printed = [notebook.finish(cell).stdout for cell in cells]
        assert printed == [f"{number} False\n" for number in range(1, 4)]
        one.agent = daemon.managers.get(timeout=SECONDS_MAX)
        assert [r.session for r in daemon.requests if isinstance(r, protocol.Tend)] == ["s0", "s2"]
    assert daemon.requests[-1] == protocol.CloseSession("s2")


def test_a_replacement_not_accepted_ends_with_the_agent(daemon: FakeDaemon, tmp_path: Path) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        images = one.save(leave_running=True)
        one.notebook.run("later = 1")
        revived = one.order(protocol.Revive(str(images), "s2", beside=True))
        assert isinstance(revived, protocol.Revived)
        with watched(revived.pid) as ended:
            one.agent.close()
            assert ended()
        assert one.notebook.run("print(later)").stdout == "1\n"
        one.agent = daemon.managers.get(timeout=SECONDS_MAX)


def test_a_hibernating_kernel_is_shut_down_at_once(
    daemon: FakeDaemon, runtime_dir: Path, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        one.hibernate()
        manager = one.notebook.manager
        manager.shutdown_wait_time = 10 * SECONDS_MAX  # the shutdown must not wait that long
        manager.shutdown_kernel()
        assert not manager.has_kernel
    assert daemon.requests[-1] == protocol.CloseSession("s0")
    assert list((runtime_dir / "kernels").iterdir()) == []


def test_a_hibernating_kernel_is_restarted(daemon: FakeDaemon, tmp_path: Path) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        before = one.notebook.manager.ports
        one.hibernate()
        one.notebook.restart()
        assert one.notebook.manager.ports == before
        assert one.notebook.run("print('counter' in dir())").stdout == "False\n"
        again = ManagedKernel(one.notebook, daemon, tmp_path / "again")
        (tmp_path / "again").mkdir()
        again.revive(again.hibernate())
        assert one.notebook.run("print(next(counter))").stdout == "1\n"


def test_the_next_agent_receives_the_waiting_process(daemon: FakeDaemon, tmp_path: Path) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        images = one.hibernate()
        cell = one.notebook.begin("print(next(counter))")
        assert one.agent.hear() == protocol.Knock()
        one.agent.close()
        one.agent = daemon.managers.get(timeout=SECONDS_MAX)
        assert one.agent.hear() == protocol.Knock()
        one.revive(images)
        assert one.notebook.finish(cell).stdout == "1\n"


def test_a_return_that_failed_is_tried_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        images = one.hibernate()
        cells = [one.notebook.begin("print(next(counter))")]
        assert one.agent.hear() == protocol.Knock()
        nowhere = protocol.Revive(str(tmp_path / "nowhere"), "s0", beside=False)
        assert isinstance(one.agent.order(nowhere), protocol.Error)
        cells.append(one.notebook.begin("print(next(counter))"))
        assert one.agent.hear() == protocol.Knock()
        one.revive(images)
        assert [one.notebook.finish(cell).stdout for cell in cells] == ["1\n", "2\n"]


def test_requests_are_forwarded_though_the_agent_has_died(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        one.order(protocol.HoldRequests(SECONDS_MAX))
        one.agent.close()
        assert one.notebook.run("print(next(counter))").stdout == "1\n"
        one.agent = daemon.managers.get(timeout=SECONDS_MAX)


def test_a_hibernating_kernel_without_an_agent_that_knows_it_ends(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        one.hibernate()
        daemon.forgotten = True
        one.agent.close()
        assert one.notebook.manager.provisioner is not None
        ended = asyncio.run(asyncio.wait_for(one.notebook.manager.provisioner.wait(), SECONDS_MAX))
        assert ended == 1


def test_a_dead_kernel_is_dead(daemon: FakeDaemon, tmp_path: Path) -> None:
    with managed_kernel(daemon, tmp_path) as one:
        one.revive(one.hibernate())
        one.notebook.begin("os._exit(7)")
        assert one.notebook.manager.provisioner is not None
        ended = asyncio.run(asyncio.wait_for(one.notebook.manager.provisioner.wait(), SECONDS_MAX))
        assert ended == 7


def test_the_process_manager_works_in_an_event_loop(daemon: FakeDaemon, tmp_path: Path) -> None:
    asyncio.run(_in_an_event_loop(daemon, tmp_path))


async def _in_an_event_loop(daemon: FakeDaemon, tmp_path: Path) -> None:
    manager = AsyncKernelManager(kernel_name="python3")
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=SECONDS_MAX)
        said: list[str] = []

        async def run(code: str) -> str:
            said.clear()
            await client.execute_interactive(
                code,
                timeout=SECONDS_MAX,
                output_hook=lambda message: said.append(message["content"].get("text", "")),
            )
            return "".join(said)

        agent = await asyncio.to_thread(daemon.managers.get, timeout=SECONDS_MAX)
        wake_fd = int(await run(SETUP))

        def order(message: protocol.Message) -> None:
            assert not isinstance(agent.order(message), protocol.Error)

        await asyncio.to_thread(order, protocol.HoldRequests(SECONDS_MAX))
        await asyncio.to_thread(order, protocol.Dump(str(tmp_path / "images"), wake_fd, False))
        assert await client.is_alive()
        cell = asyncio.create_task(run("print(next(counter))"))
        assert await asyncio.to_thread(agent.hear) == protocol.Knock()
        await asyncio.to_thread(order, protocol.Revive(str(tmp_path / "images"), "s0", False))
        await asyncio.to_thread(order, protocol.LetThrough())
        assert await cell == "1\n"
    finally:
        client.stop_channels()
        await manager.shutdown_kernel()


def test_a_notebook_is_opened_while_its_kernel_hibernates(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    (tmp_path / "notebooks").mkdir()
    server = Server(tmp_path / "notebooks")
    try:
        asyncio.run(_open(server, daemon, tmp_path))
    finally:
        server.close()


async def _open(server: Server, daemon: FakeDaemon, directory: Path) -> None:
    kernel_id = server.fetch("api/kernels", "POST", {"name": "python3"})["id"]
    agent = daemon.managers.get(timeout=SECONDS_MAX)
    url = server.url.replace("http", "ws") + f"api/kernels/{kernel_id}/channels?session_id=tab"
    request = HTTPRequest(url, headers={"Authorization": f"token {server.token}"})

    async def run(tab: WebSocketClientConnection, code: str) -> str:
        header = {"msg_id": secrets.token_hex(), "msg_type": "execute_request", "version": "5.3"}
        message = {"channel": "shell", "header": {**header, "username": "", "session": "tab"}}
        rest: dict[str, Any] = {"parent_header": {}, "metadata": {}, "buffers": []}
        await tab.write_message(json.dumps({**message, **rest, "content": {"code": code}}))
        printed = ""
        while True:
            received = await asyncio.wait_for(tab.read_message(), SECONDS_MAX)
            said = json.loads(received or "")
            if said["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            printed += said["content"].get("text", "")
            if said["content"].get("execution_state") == "idle":
                return printed

    async def order(message: protocol.Message) -> None:
        assert not isinstance(await asyncio.to_thread(agent.order, message), protocol.Error)

    async def hibernate(name: str) -> None:
        await order(protocol.HoldRequests(SECONDS_MAX))
        await order(protocol.Dump(str(directory / name), wake_fd, leave_running=False))

    async def come_back(name: str) -> None:
        assert await asyncio.to_thread(agent.hear) == protocol.Knock()
        await order(protocol.Revive(str(directory / name), "s0", beside=False))
        await order(protocol.LetThrough())

    tab = await websocket_connect(request)
    wake_fd = int(await run(tab, SETUP))
    await hibernate("first")
    cell = asyncio.create_task(run(tab, "print(next(counter))"))
    await come_back("first")
    assert await cell == "1\n"
    await hibernate("second")
    await disconnect(tab)
    opening = asyncio.create_task(_connect(request))
    await come_back("second")
    tab = await opening
    assert await run(tab, "print(next(counter))") == "2\n"
    await hibernate("third")
    await asyncio.to_thread(server.fetch, f"api/kernels/{kernel_id}", "DELETE")
    await disconnect(tab)


async def _connect(request: HTTPRequest) -> WebSocketClientConnection:
    return await websocket_connect(request)


def test_the_kernel_ends_with_its_server(daemon: FakeDaemon, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        pid, name = server.stdout.readline().split()
        daemon.managers.get(timeout=SECONDS_MAX)  # the process manager has reached the daemon
        with watched(int(pid)) as ended:
            server.communicate("\n", timeout=SECONDS_MAX)
            assert server.returncode == 9
            assert ended()
    Path(name).unlink()
