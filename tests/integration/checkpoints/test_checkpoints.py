"""Checkpoints of kernels are stored unchanged, or refused; with toy workers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.framing import send_message
from kernelproxy.common.protocol import (
    Carried,
    Checkpoint,
    CheckpointBegun,
    CheckpointOpened,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    CloseSession,
    DeleteCheckpoint,
    KernelRequest,
    Message,
    OpenCheckpoint,
    Progress,
    Restore,
    RestoreReply,
)
from kernelproxy.common.protocol.views import CheckpointView, RestoreView
from kernelproxy.common.shared_memory import close_all
from kernelproxy.kernel import activation
from kernelproxy.storage.threads import Cancel, file_lock
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ROOT, ToyHost

StartHost = Callable[..., ToyHost]
ABOUT = {"saved": [{"name": "x", "kind": "int", "bytes": 3}], "omitted": []}


@pytest.fixture(autouse=True)
def _data(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))


def host_state(position: int, *parts: bytes, storages: Any = (), **changes: Any) -> dict[str, Any]:
    found = {
        "position": position,
        "parts": [len(part) for part in parts],
        "storages": list(storages),
        "about": ABOUT,
        "files": [],
    }
    return found | changes


def hand_over(
    session: str,
    name: str,
    state: dict[str, Any],
    content: bytes,
    files: bytes = b"",
    *,
    automatic: bool = False,
) -> CheckpointView:
    fds = [os.memfd_create(name) for name in ("host", "files")]
    try:
        os.write(fds[0], content)
        os.write(fds[1], files)
        with agent_client.connect(start=False) as connection:
            request = Checkpoint(session, name, automatic, state)
            reply, _ = connection.call_with_fds(request, WAIT_SECONDS, fds)
            assert isinstance(reply, CheckpointBegun)
            while not isinstance(reply, CheckpointReply):
                reply = connection.more(WAIT_SECONDS)
                assert isinstance(reply, Progress | CheckpointReply)
            return reply.checkpoint
    finally:
        close_all(fds)


def take_out(name: str) -> tuple[CheckpointOpened, bytes, bytes, bytes]:
    with agent_client.connect(start=False) as connection:
        reply, fds = connection.last(OpenCheckpoint(name), WAIT_SECONDS)
    assert isinstance(reply, CheckpointOpened)
    contents = [os.pread(fd, os.fstat(fd).st_size, 0) for fd in fds]
    for fd in fds:
        os.close(fd)
    return reply, contents[0], contents[1], contents[2]


def listed(host: ToyHost) -> list[CheckpointView]:
    reply = host.call(CheckpointsRequest())
    assert isinstance(reply, CheckpointsReply)
    return reply.checkpoints


def test_parts_come_back_as_they_were(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client("lessons/digits.ipynb")
    parts = os.urandom(100), b"", os.urandom(5 << 20)
    rows = [
        {"path": "/h/a", "kind": "file", "mode": 0o644, "mtime_ns": 5, "size": 3, "target": ""},
        {"path": "/h/b", "kind": "absent", "mode": 0, "mtime_ns": 0, "size": 0, "target": ""},
        {"path": "/h/c", "kind": "file", "mode": 0o600, "mtime_ns": 6, "size": 4, "target": ""},
    ]
    state = host_state(0, *parts, files=rows)
    made = hand_over(client.session, "one", state, b"".join(parts), b"abcdefg")
    assert (made["name"], made["session"]) == ("one", "lessons/digits.ipynb")
    assert made["saved"] == ABOUT["saved"]
    reply, content, device, files = take_out("one")
    assert (reply.files, files, made["files"]) == (rows, b"abcdefg", 3)
    assert reply.parts == [100, 0, 5 << 20]
    assert (content, device, reply.storages) == (b"".join(parts), b"", [])
    assert [each["name"] for each in listed(host)] == ["one"]
    unnamed = hand_over(client.session, "", host_state(0, b"x"), b"x")["name"]
    assert unnamed.startswith("lessons-digits-2")
    host.call(CloseSession(client.session))  # checkpoints stay
    assert {each["name"] for each in listed(host)} == {"one", unnamed}
    host.call(DeleteCheckpoint("one"))
    with pytest.raises(ControlError, match="no checkpoint 'one'"):
        host.call(DeleteCheckpoint("one"))
    with pytest.raises(ControlError, match="no checkpoint 'one'"):
        take_out("one")


def files_of_checkpoints(host: ToyHost) -> set[tuple[int, int]]:
    """Return device and inode numbers of files that the agent holds for open checkpoints."""
    found = set()
    for fd in Path(f"/proc/{host.agent_pid()}/fd").iterdir():
        try:
            where, stat = os.readlink(fd), fd.stat()
        except FileNotFoundError:  # it was closed
            continue
        if where.startswith("/memfd:sing-checkpoint") or "/states/tmp/" in where:
            found.add((stat.st_dev, stat.st_ino))
    return found


def test_a_checkpoint_that_is_opened_often_is_read_once(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    content = os.urandom(1 << 20)
    rows = [{"path": "/h/a", "kind": "file", "mode": 0o644, "mtime_ns": 5, "size": 3, "target": ""}]
    for index in range(6):
        hand_over(client.session, f"c{index}", host_state(0, content, files=rows), content, b"abc")
    held: list[int] = []
    try:
        for _ in range(20):
            with agent_client.connect(
                start=False
            ) as connection:  # the files outlive the connection
                held += connection.last(OpenCheckpoint("c0"), WAIT_SECONDS)[1]
        assert {os.fstat(fd)[1:3] for fd in held} == {(i, d) for d, i in files_of_checkpoints(host)}
        assert len(files_of_checkpoints(host)) == 3
        assert all(os.pread(fd, 1 << 21, 0) == content for fd in held[::3])
        writable = os.open(f"/proc/self/fd/{held[0]}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.write(writable, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 1 << 30)
        os.close(writable)
        os.lseek(held[0], 5, os.SEEK_SET)
        assert os.lseek(held[3], 0, os.SEEK_CUR) == 0  # each has its own position
        for index in range(1, 5):
            with agent_client.connect(start=False) as connection:
                held += connection.last(OpenCheckpoint(f"c{index}"), WAIT_SECONDS)[1]
        with pytest.raises(ControlError, match="You have 5 checkpoints open already: end a"):
            take_out("c5")  # one of the session's own, and four others
        assert take_out("c0")[1] == content
        hand_over(client.session, "c0", host_state(0, b"new"), b"new")  # another one of this name
        close_all(held[60:63])
        del held[60:63]
        assert take_out("c0")[1] == b"new"
    finally:
        close_all(held)
    wait_until(lambda: not files_of_checkpoints(host))


def test_a_name_that_is_taken_is_given_to_the_new_one(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    for content in (b"old", b"newer"):
        hand_over(client.session, "one", host_state(0, content), content)
    assert take_out("one")[1] == b"newer"
    assert len(listed(host)) == 1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "bad-request"),
        (host_state(0, b"x") | {"parts": [1, 1]}, "bad-request"),
        (host_state(0, b"x") | {"parts": [2, -1]}, "bad-request"),
        (host_state(0, b"x") | {"parts": "x"}, "bad-request"),
        (host_state(0, b"x") | {"storages": [[1]]}, "bad-request"),
        (host_state(0, b"x") | {"about": {"saved": []}}, "bad-request"),
        (host_state(0, b"x") | {"files": [{"kind": "file", "size": 1}]}, "bad-request"),
        (host_state(0, b"x") | {"files": [{"kind": "file"}]}, "bad-request"),
        (host_state(0, b"x", storages=[[1, 5000]]), "damaged"),
        (host_state(8, b"x", storages=[[1, 5000]]), "busy"),
    ],
)
def test_invalid_requests_are_refused(
    toy_host: StartHost, state: dict[str, Any], reason: str
) -> None:
    host = toy_host()
    client = host.client()
    with pytest.raises(ControlError) as refused:
        hand_over(client.session, "one", state, b"x")
    assert refused.value.reason == reason
    assert listed(host) == []
    client.add(1)
    assert client.read() == client.state


@pytest.mark.parametrize("name", ["../one", "a/b", ".hidden", "x" * 200, "a\n", "a\0"])
def test_names_lead_nowhere(toy_host: StartHost, name: str) -> None:
    host = toy_host()
    client = host.client()
    with pytest.raises(ControlError, match="cannot be the name"):
        hand_over(client.session, name, host_state(0, b"x"), b"x")
    for request in (OpenCheckpoint(name), DeleteCheckpoint(name), Restore(client.session, name)):
        with pytest.raises(ControlError, match="no checkpoint"):
            host.call(request)


def test_a_kernel_that_is_interrupted_keeps_its_session(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    client.read()
    for index in range(5):
        fds = [os.memfd_create(name) for name in ("host", "files")]
        os.write(fds[0], b"x")
        request = Checkpoint(client.session, f"c{index}", False, host_state(0, b"x"))
        with agent_client.connect(start=False).detach() as sock:
            send_message(sock, request, fds)
        close_all(fds)
    client.add(2)
    assert client.read() == client.state
    hand_over(client.session, "last", host_state(0, b"x"), b"x")
    assert client.read() == client.state


def test_a_notebook_is_accepted_from_its_kernel_only(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    program = (
        "import os\nfrom kernelproxy.common.ipc import agent_client as control\n"
        "from kernelproxy.common import protocol\n"
        "fds = [os.memfd_create('a'), os.memfd_create('b')]; os.write(fds[0], b'x')\n"
        "with control.connect(start=False) as c:\n"
        f"    request = protocol.Checkpoint({client.session!r}, 'one', False,"
        f" {host_state(0, b'x')!r})\n"
        f"    try: c.call_with_fds(request, {WAIT_SECONDS}, fds)\n"
        "    except control.ControlError as error: print(error.reason)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, env=environment, capture_output=True, text=True
    )
    assert said.stdout == "not-allowed\n"
    assert listed(host) == []


class CheckpointKernel:
    """Receives requests for checkpoints as a notebook's kernel does; callers wait in threads."""

    def __init__(self, host: ToyHost) -> None:
        self.host = host
        self.requests: list[KernelRequest] = []
        self.replies: list[Any] = []
        self._asking: list[threading.Thread] = []

    def ask(self, request: Any) -> KernelRequest:
        """Send a request from a thread; return the one that the kernel receives."""

        def run() -> None:
            try:
                self.replies.append(self.host.call(request))
            except ControlError as error:
                self.replies.append(error)

        before = len(self.requests)
        self._asking.append(threading.Thread(target=run))
        self._asking[-1].start()
        wait_until(lambda: len(self.requests) > before or self.replies)
        return self.requests[-1] if self.requests else KernelRequest("", "")

    def reply(self) -> Any:
        for thread in self._asking:
            thread.join(WAIT_SECONDS)
        return self.replies.pop(0)


@pytest.fixture
def kernel(toy_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> CheckpointKernel:
    found = CheckpointKernel(toy_host())
    monkeypatch.setattr(activation.state, "on_request", found.requests.append)
    return found


def test_a_caller_gets_its_reply_when_the_kernel_has_delivered(kernel: CheckpointKernel) -> None:
    client = kernel.host.client()
    kernel_request = kernel.ask(Checkpoint(client.session, "one", automatic=True))
    assert (kernel_request.verb, kernel_request.name, kernel_request.automatic) == (
        "checkpoint",
        "one",
        True,
    )
    hand_over(client.session, "one", host_state(0, b"x"), b"x")
    assert kernel.reply().checkpoint["name"] == "one"


def test_callers_and_subscribers_receive_the_progress(
    kernel: CheckpointKernel, tmp_path: Path
) -> None:
    client = kernel.host.client()
    hand_over(client.session, "before", host_state(0, b"x"), b"x")
    threads: list[threading.Thread] = []

    def begin_storing() -> None:
        wait_until(lambda: kernel.requests)
        hand_over(client.session, "one", host_state(0, b"x"), b"x")

    lock = tmp_path / "data" / "states" / "lock"
    with agent_client.connect(start=False) as connection:
        with file_lock(lock, shared=False, seconds=WAIT_SECONDS, cancel=Cancel()):
            threads.append(threading.Thread(target=begin_storing))
            threads[0].start()
            # It cannot store now, and reports progress until it can.
            first = connection.call(Checkpoint(client.session, "one"), WAIT_SECONDS)
            assert isinstance(first, Progress)
            wait_until(lambda: kernel.host.session(client)["progress"])
            progress = kernel.host.session(client)["progress"]
            assert progress is not None
            assert (progress["verb"], progress["checkpoint"]) == ("checkpoint", "one")
        reply: Message = first
        while isinstance(reply, Progress):
            reply = connection.more(WAIT_SECONDS)
        assert isinstance(reply, CheckpointReply)
    threads[0].join(WAIT_SECONDS)
    assert kernel.host.session(client)["progress"] is None


def test_a_caller_receives_the_outcome_of_a_restore(kernel: CheckpointKernel) -> None:
    client = kernel.host.client()
    hand_over(client.session, "one", host_state(0, b"x"), b"x")
    outcome: RestoreView = {
        "checkpoint": "one",
        "variables": 1,
        "files": 0,
        "aside": {},
        "problems": [],
    }
    kernel_request = kernel.ask(Restore(client.session, "one"))
    kernel.host.call(
        Carried(client.session, kernel_request.verb, kernel_request.name, "", {**outcome})
    )
    assert kernel.reply() == RestoreReply(outcome)
    kernel_request = kernel.ask(Restore(client.session, "one"))
    kernel.host.call(
        Carried(client.session, kernel_request.verb, kernel_request.name, "There is no torch.")
    )
    assert "There is no torch" in str(kernel.reply())
    kernel.ask(Restore(client.session, "none"))
    assert kernel.reply().reason == "unknown-checkpoint"


def test_a_request_to_a_kernel_that_ends_fails(kernel: CheckpointKernel) -> None:
    client = kernel.host.client()
    kernel.ask(Checkpoint(client.session, "one"))
    kernel.host.call(CloseSession(client.session))
    assert kernel.reply().reason == "ended"


def test_a_session_whose_kernel_is_absent_refuses_requests(kernel: CheckpointKernel) -> None:
    with pytest.raises(ControlError, match="cannot be reached"):
        kernel.host.call(Checkpoint(kernel.host.open()))


def test_an_unknown_form_is_refused(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with pytest.raises(ControlError, match="namespace or process") as refused:
        host.call(Checkpoint(client.session, "any", form="pickle"))
    assert refused.value.reason == "bad-request"


def test_a_program_declines(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    with pytest.raises(ControlError, match="only notebooks have checkpoints"):
        host.call(Checkpoint(client.session))
