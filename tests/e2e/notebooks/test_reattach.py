"""A server that ends or dies leaves its kernels running, and finds them after its restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_core.paths import jupyter_runtime_dir
from tornado.websocket import websocket_connect

from kernelproxy.agent.process.hibernation import REASON
from kernelproxy.common.ipc.agent_client import credentials, open_socket
from kernelproxy.kernel_host import SOCKET_NAME, directory
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX, sessions, wait_for_session
from tests.e2e.notebooks.test_server import Server, disconnect, run, wait_for_ready

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NOTEBOOK = {"path": "a.ipynb", "type": "notebook", "name": "a.ipynb"}
# Trains on the device until a file exists, and for some steps more.
TRAIN = """
import os, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).to('cuda')
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 8, device='cuda')
count, steps, losses = torch.zeros(1, device='cuda'), 0, []
def step():
    global steps
    optimizer.zero_grad()
    loss = ((model(data) - data.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    count.add_(1)
    steps += 1
    losses.append(loss.item())
step()
print('begun')
open({begun!r}, 'w').close()
while not os.path.exists({enough!r}):
    step()
for _ in range(100):
    step()
print('learnt', losses[-1] < losses[0], count.item() == steps == len(losses))
"""


@pytest.fixture(params=["plain", "process"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set how kernels are started; a kernel whose process can be saved is behind a ZMQ proxy."""
    monkeypatch.setenv("JUPYTER_SING_SAVE_PROCESS", str(int(request.param == "process")))
    return str(request.param)


plain = pytest.mark.parametrize("form", ["plain"], indirect=True)
process = pytest.mark.parametrize("form", ["process"], indirect=True)
exhaustive = pytest.mark.exhaustive

Start = Callable[..., Server]


@pytest.fixture
def start(runtime_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a server in the test's directory, as often as wanted."""
    root = tmp_path / "notebooks"
    root.mkdir()
    started: list[Server] = []

    def one(*options: str) -> Server:
        started.append(Server(root, *options))
        return started[-1]

    try:
        yield one
    finally:
        for each in started:
            each.close()


def end(server: Server, number: int) -> None:
    """End a server by a signal."""
    server.process.send_signal(number)
    server.process.wait(SECONDS_MAX)


@contextlib.contextmanager
def client_of(kernel_id: str) -> Iterator[BlockingKernelClient]:
    client = BlockingKernelClient()
    client.load_connection_file(f"{jupyter_runtime_dir()}/kernel-{kernel_id}.json")
    client.start_channels(hb=False)
    try:
        yield client
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)


def begin(kernel_id: str, code: str) -> None:
    """Start a cell, and wait until the kernel executes it."""
    with client_of(kernel_id) as client:
        wait_for_ready(client)  # so that its next output is received
        cell = client.execute(code)
        while True:
            said = client.get_iopub_msg(timeout=SECONDS_MAX)
            begun = said["msg_type"] == "execute_input"
            if begun and said["parent_header"].get("msg_id") == cell:
                return


def state(server: Server, kernel_id: str) -> str:
    return str(server.fetch(f"api/kernels/{kernel_id}")["execution_state"])


@pytest.mark.parametrize(
    ("form", "number"),
    [
        pytest.param("plain", signal.SIGKILL, id="plain-killed"),
        pytest.param("process", signal.SIGTERM, id="process-terminated"),
        pytest.param("plain", signal.SIGTERM, id="plain-terminated", marks=exhaustive),
        pytest.param("process", signal.SIGKILL, id="process-killed", marks=exhaustive),
    ],
    indirect=["form"],
)
def test_restarted_server_reattaches_a_training_kernel(
    start: Start, form: str, number: int, tmp_path: Path
) -> None:
    server = start()
    opened = server.fetch("api/sessions", "POST", {**NOTEBOOK, "kernel": {"name": "python3"}})
    kernel_id = opened["kernel"]["id"]
    assert run(kernel_id, "x = 42; import os; print(os.getpid(), os.getppid())")
    (device_session,) = sessions()
    begun, enough = tmp_path / "begun", tmp_path / "enough"
    begin(kernel_id, TRAIN.format(begun=str(begun), enough=str(enough)))
    wait_until(begun.exists)
    end(server, number)

    server = start()
    (found,) = server.fetch("api/sessions")
    assert (found["id"], found["path"]) == (opened["id"], "a.ipynb")
    assert found["kernel"]["id"] == kernel_id
    assert found["kernel"]["execution_state"] == "busy"
    enough.touch()
    wait_until(lambda: state(server, kernel_id) == "idle")
    assert (
        run(kernel_id, "print(x, losses[-1] < losses[0], count.item() == steps)")
        == "42 True True\n"
    )
    (same,) = sessions()
    assert (same["id"], same["kernel_pid"]) == (device_session["id"], device_session["kernel_pid"])

    begin(kernel_id, "import time\nwhile True: time.sleep(0.01)")
    wait_until(lambda: state(server, kernel_id) == "busy")
    server.fetch(f"api/kernels/{kernel_id}/interrupt", "POST")
    wait_until(lambda: state(server, kernel_id) == "idle")
    assert run(kernel_id, "print(x)") == "42\n"
    server.fetch(f"api/kernels/{kernel_id}/restart", "POST")
    assert run(kernel_id, "print('x' in globals())") == "False\n"
    end(server, number)

    server = start()
    (found,) = server.fetch("api/sessions")
    assert (found["id"], found["kernel"]["id"]) == (opened["id"], kernel_id)
    wait_until(lambda: state(server, kernel_id) == "idle")
    server.fetch(f"api/sessions/{opened['id']}", "DELETE")
    assert (server.fetch("api/kernels"), server.fetch("api/sessions"), sessions()) == ([], [], [])


async def received(server: Server, kernel_id: str, session: str, until: str) -> list[str]:
    """Connect as JupyterLab does; return the output until a text appears."""
    url = f"ws{server.url.removeprefix('http')}api/kernels/{kernel_id}/channels"
    socket = await websocket_connect(f"{url}?session_id={session}&token={server.token}")
    printed: list[str] = []
    while not any(until in text for text in printed):
        said = await asyncio.wait_for(socket.read_message(), SECONDS_MAX)
        assert said is not None, "the server has hung up"
        message = json.loads(said)
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
    await disconnect(socket)
    return printed


@process
def test_reconnected_client_receives_further_output(
    start: Start, form: str, tmp_path: Path
) -> None:
    server = start()
    opened = server.fetch("api/sessions", "POST", {**NOTEBOOK, "kernel": {"name": "python3"}})
    kernel_id = opened["kernel"]["id"]
    begun, enough = tmp_path / "begun", tmp_path / "enough"
    begin(kernel_id, TRAIN.format(begun=str(begun), enough=str(enough)))
    wait_until(begun.exists)
    end(server, signal.SIGKILL)
    server = start()

    async def connected() -> list[str]:
        receiving = asyncio.create_task(received(server, kernel_id, "lab", "learnt"))
        while server_state(await asyncio.to_thread(server.fetch, "api/kernels")) != ("busy", 1):
            assert not receiving.done()
        enough.touch()
        return await receiving

    (printed,) = asyncio.run(connected())
    assert printed == "learnt True True\n"


def server_state(kernels: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the state of the only kernel, and its number of connections."""
    (kernel,) = kernels
    return kernel["execution_state"], kernel["connections"]


@plain
def test_servers_of_one_directory_keep_their_own_kernels(start: Start, form: str) -> None:
    first, second = start(), start()
    of_first = first.fetch("api/kernels", "POST", {"name": "python3"})["id"]
    of_second = second.fetch("api/kernels", "POST", {"name": "python3"})["id"]
    run(of_first, "x = 1")
    end(first, signal.SIGKILL)
    assert [each["id"] for each in second.fetch("api/kernels")] == [of_second]
    third = start()
    assert [each["id"] for each in third.fetch("api/kernels")] == [of_first]
    assert [each["id"] for each in second.fetch("api/kernels")] == [of_second]
    assert run(of_first, "print(x)") == "1\n"


def test_server_shutdown_ends_its_kernels(start: Start, form: str) -> None:
    server = start()
    server.fetch("api/sessions", "POST", {**NOTEBOOK, "kernel": {"name": "python3"}})
    wait_until(lambda: sessions()[0]["kernel_pid"])
    server.fetch("api/shutdown", "POST")
    server.process.wait(SECONDS_MAX)
    assert sessions() == []
    server = start()
    assert (server.fetch("api/kernels"), server.fetch("api/sessions")) == ([], [])


def test_kernels_end_with_their_server_if_not_kept(start: Start, form: str) -> None:
    server = start("--SingExtension.keep_kernels=0")
    server.fetch("api/sessions", "POST", {**NOTEBOOK, "kernel": {"name": "python3"}})
    wait_until(lambda: sessions()[0]["kernel_pid"])
    end(server, signal.SIGKILL)
    wait_until(lambda: sessions() == [])


@process
def test_kernels_without_a_server_end_after_a_time(start: Start, form: str) -> None:
    server = start("--SingExtension.keep_kernels=0.5")
    server.fetch("api/sessions", "POST", {**NOTEBOOK, "kernel": {"name": "python3"}})
    wait_until(lambda: sessions()[0]["kernel_pid"])
    end(server, signal.SIGKILL)
    wait_until(lambda: sessions() == [])
    server = start()
    assert (server.fetch("api/kernels"), server.fetch("api/sessions")) == ([], [])


@process
def test_kernel_that_died_without_a_server_is_offered_its_last_checkpoint(
    start: Start, form: str, runtime_dir: Path
) -> None:
    server = start()
    opened = server.fetch("api/sessions", "POST", {**NOTEBOOK, "kernel": {"name": "python3"}})
    kernel_id = opened["kernel"]["id"]
    run(kernel_id, "x = 42")
    (session,) = sessions()
    path = f"jupyter-sing/api/sessions/{session['id']}/checkpoint"
    server.fetch(path, "POST", {"name": "mine", "form": "namespace"})
    end(server, signal.SIGTERM)
    os.kill(existing(session["kernel_pid"]), signal.SIGKILL)
    wait_until(lambda: "has ended" in (runtime_dir / "attendant.log").read_text())
    (left,) = (runtime_dir / "servers").iterdir()
    (left / "torn.kernel").write_text("{")

    server = start()
    assert (server.fetch("api/kernels"), server.fetch("api/sessions")) == ([], [])
    log = server.log.read_text()
    died = f"kernel {kernel_id} died while it had no server: %sing restore mine restores its last"
    assert log.count(died) == 1
    assert log.count("a kernel is not found again: torn.kernel") == 1
    assert not list(left.glob("*.kernel"))


@plain
def test_reattached_kernel_is_restarted_when_it_dies(start: Start, form: str) -> None:
    server = start()
    kernel_id = server.fetch("api/kernels", "POST", {"name": "python3"})["id"]
    run(kernel_id, "x = 42")
    (before,) = sessions()
    end(server, signal.SIGTERM)
    server = start()
    os.kill(existing(before["kernel_pid"]), signal.SIGKILL)
    wait_until(lambda: [e for e in sessions() if e["id"] != before["id"] and e["kernel_pid"]])
    assert run(kernel_id, "print('x' in globals())") == "False\n"
    assert [each["id"] for each in server.fetch("api/kernels")] == [kernel_id]


@plain
def test_server_survives_the_death_of_the_kernel_host(start: Start, form: str) -> None:
    server = start()
    kernel_id = server.fetch("api/kernels", "POST", {"name": "python3"})["id"]
    run(kernel_id, "x = 42")
    (before,) = sessions()
    with open_socket(directory() / SOCKET_NAME) as sock:
        os.kill(credentials(sock)[0], signal.SIGKILL)
    wait_until(lambda: [e for e in sessions() if e["id"] != before["id"] and e["kernel_pid"]])
    assert run(kernel_id, "print('x' in globals())") == "False\n"
    end(server, signal.SIGKILL)
    server = start()
    assert [each["id"] for each in server.fetch("api/kernels")] == [kernel_id]


@process
def test_hibernating_kernel_is_reattached_without_waking(start: Start, form: str) -> None:
    server = start("--SingExtension.hibernate_timeout=1")
    kernel_id = server.fetch("api/kernels", "POST", {"name": "python3"})["id"]
    run(kernel_id, "numbers = iter(range(9)); next(numbers)")
    wait_for_session(lambda found: found["reason"] == REASON)
    end(server, signal.SIGKILL)
    server = start()
    assert state(server, kernel_id) == "idle"
    wait_for_session(lambda found: found["reason"] == REASON)
    assert run(kernel_id, "print(next(numbers))") == "1\n"
    wait_for_session(lambda found: found["reason"] == REASON)
    server.fetch(f"api/kernels/{kernel_id}", "DELETE")
    assert sessions() == []
