"""A real server, as a user starts it: installing the package is all that was done."""

from __future__ import annotations

import json
import os
import secrets
import socket
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

from jupyter_sing import cli
from tests.e2e.kernels import SECONDS_MAX, wait_for_session

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Server:
    """A Jupyter server in a process of its own."""

    def __init__(self, root: Path, *options: str) -> None:
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
        settings = ["--ip=127.0.0.1", f"--ServerApp.root_dir={root}", *options]
        port, self.token = _free_port(), secrets.token_hex()
        self.url = f"http://127.0.0.1:{port}/"
        self.log = root.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--port={port}", "--ServerApp.port_retries=0", *settings],
                stdout=log,
                stderr=log,
                env={**os.environ, "JUPYTER_TOKEN": self.token},
            )
        deadline, pause = time.monotonic() + SECONDS_MAX, threading.Event()
        while True:
            try:
                self.fetch("api/status")
                return
            except urllib.error.URLError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise AssertionError(self.log.read_text(errors="replace")) from None
            pause.wait(0.05)

    def fetch(self, path: str, method: str = "GET", body: Any = None) -> Any:
        data = (
            json.dumps(body).encode() if body is not None else (b"" if method == "POST" else None)
        )
        request = urllib.request.Request(self.url + path, method=method, data=data)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=SECONDS_MAX)


def _free_port() -> int:
    """Find a port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


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
    """Run code in a kernel of the server; return what it printed."""
    client = BlockingKernelClient()
    client.load_connection_file(f"{jupyter_runtime_dir()}/kernel-{kernel_id}.json")
    client.start_channels()
    printed = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    try:
        client.wait_for_ready(timeout=SECONDS_MAX)
        reply = client.execute_interactive(code, output_hook=collect, timeout=SECONDS_MAX)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)
    return "".join(printed)


def test_a_notebook_is_seen_suspended_and_resumed_from_everywhere(
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

    assert cli.main(["resume", "--json", session["id"][:6]]) == 0
    assert json.loads(capsys.readouterr().out)["tier"] == "resident"
    assert run(kernel_id, "print(x.sum().item())") == "10.0\n"
    server.fetch(f"api/kernels/{kernel_id}", "DELETE")
    assert server.fetch("jupyter-sing/api/sessions") == []
