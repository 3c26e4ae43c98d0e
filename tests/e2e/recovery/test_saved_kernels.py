"""Kernels whose process is saved: what cells observe, with an agent double at the other end.

The process is not really saved: a line tells the same process that it was restored.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    AwaitCheckpoint,
    Carried,
    Checkpoint,
    CheckpointBegun,
    CheckpointOpened,
    CheckpointReply,
    Done,
    Error,
    KernelRequest,
    LastCheckpoint,
    Left,
    Message,
    OpenCheckpoint,
    Progress,
    RestoreReply,
    TakeOver,
)
from tests.doubles.daemon.agent import OneKernelAgent, wake
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX, Kernel
from tests.integration.conftest import ROOT, lives

pytestmark = pytest.mark.e2e

MADE: Any = {  # what a client looks at of a checkpoint
    "name": "mine", "saved": [{"name": "x"}], "omitted": [], "files": 0,
    "only_process": [
        {"name": "lines", "why": "a generator", "partly": False},
        {"name": "guard", "why": "lock: a lock", "partly": True},
    ],
    "bytes": 1, "exclusive": 1,
    "torch": "", "device": "cpu:0",
}  # fmt: skip


class CheckpointHost:
    """The agent's side of checkpoints, without a store."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.saved: tuple[Checkpoint, list[int]] | None = None
        self.left = threading.Event()
        self.refusal = ""
        self._nothing = os.memfd_create("nothing")
        self._lock = threading.Lock()

    def serve(self, channel: socket.socket, request: Message, fds: list[int]) -> None:
        """Serve one connection."""
        with self._lock:
            self.asked.append(request)
        match request:
            case Checkpoint():
                self.saved = request, [os.dup(fd) for fd in fds]
                send_message(channel, CheckpointBegun(leaves=True, name="mine"))
                with pytest.raises(ConnectionError):
                    recv_message(channel)
                self.left.set()
            case LastCheckpoint() if self.saved is None:
                send_message(channel, Error("Nothing is saved yet.", "unknown-checkpoint"))
            case LastCheckpoint():
                send_message(channel, CheckpointReply(MADE))
            case AwaitCheckpoint():
                send_message(channel, Progress(1, 2))
                send_message(channel, CheckpointReply(MADE))
            case OpenCheckpoint(form=form):
                send_message(channel, *self._opened(form))
            case TakeOver() if self.refusal:
                send_message(channel, Error(self.refusal, "unavailable"))
            case TakeOver():
                nothing: Any = {}
                send_message(channel, RestoreReply(nothing))
            case _:
                send_message(channel, Done())

    def _opened(self, form: str) -> tuple[CheckpointOpened, list[int]]:
        assert self.saved is not None
        request, (host, files) = self.saved
        assert request.host is not None
        nothing = self._nothing
        if form != "namespace":
            opened = CheckpointOpened(MADE, [], [], request.host["files"], "process")
            return opened, [nothing, nothing, files]
        opened = CheckpointOpened(MADE, request.host["parts"], [], request.host["files"])
        return opened, [host, nothing, files]

    def close(self) -> None:
        for fd in [self._nothing, *(self.saved[1] if self.saved else [])]:
            os.close(fd)


class SavedNotebook:
    """A real kernel that can be saved, and its agent."""

    def __init__(self, directory: Path, sockets: str) -> None:
        self.host = CheckpointHost()
        self.agent = OneKernelAgent(directory / "agent.sock", self.host.serve)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SING_BUNDLE": str(ROOT),
            "SING_SESSION": "first",
            "SING_SOCKET": str(directory / "agent.sock"),
            "SING_EXTENSIONS": "jupyter_sing.notebook.magics",
            "IPYTHONDIR": str(directory / "ipython"),
        }
        # TCP ports are chosen before they are bound, so that other tests could find the same ones
        # free.
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/k")
        ours = {"provisioner_name": "local-provisioner"}  # whatever other tests have set
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.metadata["kernel_provisioner"] = ours
        self.manager.start_kernel(
            env=environment,
            extra_arguments=["--ext=kernelproxy.kernel.ipython_extension"],
            cwd=str(directory),
        )
        self.clients: list[Kernel] = []

    def begin(self) -> None:
        """Wait until it has started."""
        self.kernel = self.client(self.manager.connection_file)
        assert self.hello() == "first"

    def client(self, connection_file: str) -> Kernel:
        # The manager knows whether it runs: a kernel that is slow to start has no heartbeat.
        client = BlockingKernelClient(parent=self.manager, connection_file=connection_file)
        client.load_connection_file()
        self.clients.append(Kernel(self.manager, client))
        client.start_channels()
        client.wait_for_ready(timeout=SECONDS_MAX)
        return self.clients[-1]

    def hello(self) -> str:
        """Wait until it has attached; return its session."""
        return self.agent.hellos.get(timeout=WAIT_SECONDS).session

    def leave(self) -> Left:
        """Do what the agent does when the kernel has closed its connection."""
        assert self.host.left.wait(WAIT_SECONDS)
        said = self.agent.leave()
        assert isinstance(said, Left), said
        return said

    @property
    def pid(self) -> int:
        pid: Any = self.manager.provisioner.pid  # type: ignore[union-attr]
        assert isinstance(pid, int)
        return pid

    def close(self) -> None:
        for each in self.clients:
            each.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.context.destroy(linger=0)
        self.agent.close()
        self.host.close()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[SavedNotebook]:
    with tempfile.TemporaryDirectory() as sockets:  # their paths must be short
        made = SavedNotebook(tmp_path, sockets)
        try:
            made.begin()
            yield made
        finally:
            made.close()


def test_the_cell_continues_after_the_process_was_saved(notebook: SavedNotebook) -> None:
    cell = notebook.kernel.begin("x = 1\n%sing checkpoint mine\nx += 1\nprint(x)")
    said = notebook.leave()
    for each in Path(f"/proc/{notebook.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            assert "memfd" not in os.readlink(each)
    wake(notebook.pid, said.wake_fd, restored=False, session="first")
    ran = notebook.kernel.finish(cell)
    assert ran.stdout.splitlines()[-1] == "2", ran
    assert ran.stdout.startswith("Saved checkpoint mine: 1 variable"), ran
    assert isinstance(notebook.host.asked[-1], AwaitCheckpoint)


def test_in_the_restored_process_the_cell_ends_in_one_line(
    notebook: SavedNotebook, tmp_path: Path
) -> None:
    notebook.kernel.run("x = 1")
    before = notebook.kernel.run("get_ipython().history_manager.session_number").shown
    notebook.kernel.run("41 + 1")
    notebook.kernel.begin("try:\n    %sing checkpoint\nexcept Exception:\n    pass\nx += 1")
    said = notebook.leave()
    found = json.loads(Path(notebook.manager.connection_file).read_text())
    other = tmp_path / "another.json"
    other.write_text(json.dumps({**found, "key": "another key"}))
    line = {"restored": True, "session": "second", "connection_file": str(other)}
    wake(notebook.pid, said.wake_fd, **line)
    assert notebook.hello() == "second"
    # Clients of the restored process sign with the other key.
    revived = notebook.client(str(other))
    ran = revived.run(
        "import os\nfrom kernelproxy.kernel import activation\nfrom ipykernel.connect import "
        "get_connection_file\n"
        "print(x, _3, In[3], os.environ['SING_SESSION'], activation.current().session)\n"
        "print(get_connection_file())\nget_ipython().history_manager.session_number"
    )
    assert ran.stdout.splitlines() == ["1 42 41 + 1 second second", str(other)], ran
    assert ran.shown != before
    assert "was not unique" not in revived.run("x").stdout
    assert not any(isinstance(each, AwaitCheckpoint) for each in notebook.host.asked)


def test_the_line_is_no_traceback(notebook: SavedNotebook) -> None:
    cell = notebook.kernel.begin("%sing checkpoint mine")
    said = notebook.leave()
    wake(notebook.pid, said.wake_fd, restored=True, session="second")
    client = notebook.kernel.client
    while True:
        message = client.get_iopub_msg(timeout=WAIT_SECONDS)
        if message["msg_type"] == "error" and message["parent_header"]["msg_id"] == cell:
            break
    assert message["content"]["traceback"] == ["Restored 'mine' (its process)."]


def test_a_request_is_carried_out_once(notebook: SavedNotebook) -> None:
    notebook.kernel.run("x = 1")
    notebook.agent.send(KernelRequest("checkpoint", "mine"))
    said = notebook.leave()
    wake(notebook.pid, said.wake_fd, restored=True, session="second")
    assert notebook.hello() == "second"
    # Requests at that moment are refused: they may have been sent to the process that was saved.
    wait_until(lambda: notebook.kernel.run("print(x)").stdout == "1\n")
    assert not any(isinstance(each, AwaitCheckpoint | Carried) for each in notebook.host.asked)


def save(notebook: SavedNotebook) -> None:
    """Make a checkpoint in which x is 1."""
    cell = notebook.kernel.begin("x = 1\n%sing checkpoint mine")
    wake(notebook.pid, notebook.leave().wake_fd, restored=False, session="first")
    notebook.kernel.finish(cell)


def test_a_replaced_process_executes_nothing_more(notebook: SavedNotebook, tmp_path: Path) -> None:
    save(notebook)
    ran = notebook.kernel.run("x = 2\n%sing restore mine\nprint(x)")
    expected = ["Restored 1 variable from mine, with the process", "2"]
    assert ran.stdout.splitlines() == expected, ran
    notebook.kernel.begin(f"open({str(tmp_path / 'executed')!r}, 'w')")
    wait_until(lambda: ignores_interrupts(notebook.pid))
    for _ in range(3):
        notebook.manager.interrupt_kernel()
    assert lives(notebook.pid)
    # A request of that time has not been started either, since replies are in order.
    assert not (tmp_path / "executed").exists()


def ignores_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (ignored,) = (line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) & 0b10)


def test_a_process_that_cannot_come_back_leaves_the_namespace(notebook: SavedNotebook) -> None:
    save(notebook)
    notebook.host.refusal = "The kernel's version is another one."
    ran = notebook.kernel.run("x = 2\n%sing restore mine\nprint(x)")
    assert ran.stdout.splitlines() == [
        "Restored 1 variable from mine",
        "  without the process: The kernel's version is another one.",
        "  not restored: lines: a generator (only its process has it)",
        "  not restored: guard: lock: a lock (only its process has it)",
        "1",
    ], ran
    ran = notebook.kernel.run("x = 3\n%sing restore mine --form process\nprint(x)")
    assert (ran.stdout, ran.stderr) == (
        "3\n", "jupyter_sing: The kernel's version is another one.\n"
    ), ran  # fmt: skip
    ran = notebook.kernel.run("%sing restore mine --form other")
    assert "has wrong arguments" in ran.stderr
