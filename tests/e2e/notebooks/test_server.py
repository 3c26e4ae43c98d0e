"""A real server, as a user starts it: installing the package is the only step before."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_core.paths import jupyter_runtime_dir
from tornado.websocket import WebSocketClientConnection, websocket_connect

from jupyter_sing.cli import commands
from tests.doubles.free_ports import free_ports
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX, wait_for_session
from tests.integration.conftest import command_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Server:
    """A Jupyter server in a process of its own."""

    def __init__(self, root: Path, *options: str) -> None:
        self.token, self.log = secrets.token_hex(), root.with_suffix(".log")
        (port,) = free_ports(1)
        self._start(port, f"--ServerApp.root_dir={root}", *options)
        if not self._answers():
            raise AssertionError(self.log.read_text(errors="replace"))

    def _start(self, port: int, *options: str) -> None:
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
        settings = ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
        self.url = f"http://127.0.0.1:{port}/"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *settings, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "JUPYTER_TOKEN": self.token},
            )

    def _answers(self) -> bool:
        """Wait until it answers; return False if it does not."""
        deadline, pause = time.monotonic() + SECONDS_MAX, threading.Event()
        while True:
            try:
                self.fetch("api/status")
                return True
            except (OSError, ValueError):  # also if another server has that port
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    return False
            pause.wait(0.05)

    def fetch(self, path: str, method: str = "GET", body: Any = None) -> Any:
        data = (
            json.dumps(body).encode() if body is not None else (b"" if method == "POST" else None)
        )
        request = urllib.request.Request(self.url + path, method=method, data=data)
        request.add_header("Authorization", f"token {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=SECONDS_MAX) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            error.close()
            raise
        return json.loads(text) if text else None

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=SECONDS_MAX)


async def disconnect(socket: WebSocketClientConnection) -> None:
    """Close a websocket, and wait until it is closed; otherwise its loop may end before."""
    socket.close()
    while await asyncio.wait_for(socket.read_message(), SECONDS_MAX) is not None:
        pass


@pytest.fixture
def server(runtime_dir: Path, tmp_path: Path) -> Iterator[Server]:
    root = tmp_path / "notebooks"
    (root / "lessons").mkdir(parents=True)
    one = Server(root, "--SingExtension.idle_timeout=0.3")
    try:
        yield one
    finally:
        one.close()


def run(kernel_id: str, code: str) -> str:
    """Run code in a kernel of the server; return its output."""
    client = BlockingKernelClient()
    client.load_connection_file(f"{jupyter_runtime_dir()}/kernel-{kernel_id}.json")
    client.start_channels(hb=False)  # a kernel that is slow to start has no heartbeat
    printed = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    try:
        wait_for_ready(client)
        reply = client.execute_interactive(code, output_hook=collect, timeout=SECONDS_MAX)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)
    return "".join(printed)


def wait_for_ready(client: BlockingKernelClient) -> None:
    """Wait until a kernel answers. Before its first heartbeat it would count as dead."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            return client.wait_for_ready(timeout=SECONDS_MAX)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


def test_notebook_is_suspended_and_resumed_by_each_front_end(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.fetch("jupyter-sing/api/sessions") == []
    notebook = {"path": "lessons/a.ipynb", "type": "notebook", "name": "a.ipynb"}
    opened = server.fetch("api/sessions", "POST", {**notebook, "kernel": {"name": "python3"}})
    kernel_id = opened["kernel"]["id"]
    run(kernel_id, "import torch\nx = torch.arange(5., device='cuda')")

    (session,) = server.fetch("jupyter-sing/api/sessions")
    assert (session["name"], session["kernel_id"]) == ("lessons/a.ipynb", kernel_id)
    resting = wait_for_session(lambda session: bool(session["state"] == "suspended"))
    assert (resting["worker_pid"], resting["memory"]) == (None, 0)

    path = f"jupyter-sing/api/sessions/{session['id']}"
    assert server.fetch(f"{path}/resume", "POST")["worker_pid"] is not None
    assert server.fetch(f"{path}/suspend", "POST")["state"] == "suspended"
    assert all(d["memory_used"] == 0 for d in server.fetch("jupyter-sing/api/devices"))

    assert commands.main(["resume", "--json", session["id"][:6]]) == 0
    assert json.loads(capsys.readouterr().out)["tier"] == "resident"
    assert run(kernel_id, "print(x.sum().item())") == "10.0\n"
    server.fetch(f"api/kernels/{kernel_id}", "DELETE")
    assert server.fetch("jupyter-sing/api/sessions") == []


def test_changes_are_sent_to_subscribers(server: Server) -> None:
    notebook = {"path": "lessons/c.ipynb", "type": "notebook", "name": "c.ipynb"}
    opened = server.fetch("api/sessions", "POST", {**notebook, "kernel": {"name": "python3"}})
    kernel_id = opened["kernel"]["id"]
    run(kernel_id, "import torch\nx = torch.ones(2, device='cuda')")
    session = wait_for_session(lambda session: bool(session["state"] == "suspended"))
    path = f"jupyter-sing/api/sessions/{session['id']}"

    async def listen() -> None:
        url = f"ws{server.url.removeprefix('http')}api/events/subscribe?token={server.token}"
        socket = await websocket_connect(url)

        async def until(**fields: Any) -> dict[str, Any]:
            while True:
                said = await asyncio.wait_for(socket.read_message(), SECONDS_MAX)
                assert said is not None, "the server has hung up"
                event: dict[str, Any] = json.loads(said)
                if all(event.get(name) == value for name, value in fields.items()):
                    return event

        await asyncio.to_thread(server.fetch, f"{path}/resume", "POST")
        # A suspension that no user has requested.
        found = await until(session=session["id"], state="suspended")
        assert (found["name"], found["kernel_id"]) == ("lessons/c.ipynb", kernel_id)
        await asyncio.to_thread(server.fetch, f"{path}/pin", "POST")
        await until(session=session["id"], pinned=True)
        await asyncio.to_thread(server.fetch, f"api/kernels/{kernel_id}", "DELETE")
        assert (await until(session=session["id"], ended=True))["name"] == "lessons/c.ipynb"
        await disconnect(socket)

    asyncio.run(listen())
    assert server.fetch("jupyter-sing/api/status")["sessions"] == []

    def kinds() -> set[str]:
        return {each["kind"] for each in server.fetch("jupyter-sing/api/activity")["events"]}

    wait_until(lambda: {"suspended", "resumed"} <= kinds())  # soon after it happened
    server.close()
    said = server.log.read_text(errors="replace")
    assert "Traceback" not in said
    assert "was destroyed" not in said


def test_dead_kernel_is_offered_its_last_checkpoint(server: Server) -> None:
    notebook = {"path": "lessons/b.ipynb", "type": "notebook", "name": "b.ipynb"}
    opened = server.fetch("api/sessions", "POST", {**notebook, "kernel": {"name": "python3"}})
    kernel_id = opened["kernel"]["id"]
    run(kernel_id, "x = 42")
    (session,) = server.fetch("jupyter-sing/api/sessions")
    # Not the pid that the kernel sees: in a sandbox it is another process's.
    assert b"ipykernel" in command_of(session["kernel_pid"])
    path = f"jupyter-sing/api/sessions/{session['id']}"
    wanted = {"name": "mine", "form": "namespace"}
    assert server.fetch(f"{path}/checkpoint", "POST", wanted)["name"] == "mine"

    async def killed() -> dict[str, Any]:
        """Kill the kernel, and wait for the server's report."""
        url = f"ws{server.url.removeprefix('http')}api/events/subscribe?token={server.token}"
        socket = await websocket_connect(url)
        os.kill(session["kernel_pid"], signal.SIGKILL)
        while True:
            said = await asyncio.wait_for(socket.read_message(), SECONDS_MAX)
            assert said is not None, "the server has hung up"
            event: dict[str, Any] = json.loads(said)
            if event.get("checkpoint"):
                await disconnect(socket)
                return event

    event = asyncio.run(killed())
    assert (event["kernel_id"], event["checkpoint"]) == (kernel_id, "mine")
    # The server restarts the kernel, under the same id.
    wait_for_session(lambda found: found["id"] != session["id"] and bool(found["kernel_pid"]))
    assert run(kernel_id, f"{event['command']}\nprint(x)").splitlines()[-1] == "42"
