"""Invalid or unauthorized requests are refused, by command and by REST, without side effects."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError

from jupyter_sing.cli import commands
from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.request_handlers import RequestHandlers
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import (
    Checkpoint,
    CheckpointsRequest,
    DeleteCheckpoint,
    KernelRequest,
    LastCheckpoint,
    Listen,
    Message,
    OpenCheckpoint,
    OpenSession,
    Restore,
    SetAutomatic,
    Stop,
)
from kernelproxy.devices import configured_devices
from kernelproxy.kernel import activation
from tests.doubles.session.client import WAIT_SECONDS
from tests.integration.checkpoints.test_checkpoints import hand_over, host_state, take_out
from tests.integration.conftest import ToyHost

pytest_plugins = ["pytest_jupyter.jupyter_server"]

StartHost = Callable[..., ToyHost]
API = "jupyter-sing/api"
UP = "../mine"


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {"ServerApp": {"jpserver_extensions": {"jupyter_sing": True}}}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def session(toy_host: StartHost, monkeypatch: pytest.MonkeyPatch) -> str:
    """Open a session of a kernel that must receive no request, with the checkpoint ``mine``."""

    def received(wish: KernelRequest) -> None:
        raise AssertionError(wish)  # in the link's thread: pytest makes it an error

    monkeypatch.setattr(activation.state, "on_request", received)
    host = toy_host()
    found = host.client().session
    hand_over(found, "mine", host_state(0, b"x" * 5000), b"x" * 5000)
    return found


def manifest(data: Path) -> Path:
    (found,) = data.glob("*/manifests/*/mine.json")
    return found


def tamper(data: Path) -> None:
    raw = manifest(data).read_bytes()
    manifest(data).write_bytes(raw.replace(b'"x"', b'"y"', 1))


def test_by_command(
    session: str, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, why in (
        (["restore", UP], "There is no checkpoint '../mine'."),
        (["restore", UP, "--session", session], "There is no checkpoint '../mine'."),
        (["restore", "--last", "nobody"], "There is no session 'nobody'."),
        (["checkpoint-delete", UP], "There is no checkpoint '../mine'."),
        (["checkpoint", session, "--name", UP], "cannot be the name"),
        (["checkpoint", "nobody"], "There is no session 'nobody'."),
    ):
        assert commands.main(arguments) == 1, arguments
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1
    tamper(data)
    for arguments in (["restore", "mine"], ["restore", "mine", "--session", session]):
        assert commands.main(arguments) == 1
        assert "is damaged: its hash is wrong" in capsys.readouterr().err
    assert commands.main(["checkpoints", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert "damaged" in found["problem"]


async def test_by_rest(session: str, data: Path, jp_fetch: Any) -> None:
    async def refused(code: int, reason: str, *path: str, body: Any = None, **options: Any) -> None:
        if body is not None:
            options |= {"method": "POST", "body": json.dumps(body)}
        with pytest.raises(HTTPClientError) as error:
            await jp_fetch(API, *path, **options)
        assert error.value.code == code, path
        assert error.value.response is not None
        assert json.loads(error.value.response.body)["reason"] == reason

    here = ("sessions", session)
    await refused(404, "unknown-checkpoint", *here, "restore", body={"name": UP})
    await refused(400, "name", *here, "checkpoint", body={"name": UP})
    await refused(404, "unknown-session", "sessions", "nobody", "checkpoint", body={})
    await refused(404, "unknown-checkpoint", "checkpoints", "none", method="DELETE")
    with pytest.raises(HTTPClientError, match="404"):
        await jp_fetch(API, "checkpoints", "..%2Fmine", method="DELETE")
    tamper(data)
    await refused(500, "damaged", *here, "restore", body={"name": "mine"})


def test_a_chunk_that_is_missing_or_of_another_content(session: str, data: Path) -> None:
    chunks = list(data.glob("*/chunks/*/*"))
    assert chunks
    contents = {each: each.read_bytes() for each in chunks}
    for each in chunks:
        each.unlink()
    with pytest.raises(ControlError) as refused:
        take_out("mine")
    assert refused.value.reason == "missing"
    for each, content in contents.items():
        each.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ControlError) as refused:
        take_out("mine")
    assert refused.value.reason == "damaged"
    for each, content in contents.items():
        each.write_bytes(content)
    assert take_out("mine")[1] == b"x" * 5000


class NoSupervisor:
    """Supervisor that keeps nothing."""

    def put(self, persisted: Any) -> None: ...

    def drop(self, session: str) -> None: ...


def test_sessions_of_other_users_are_refused(
    toy_host: StartHost, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users at one daemon, which knows them by their peer credentials."""
    owner, stranger = 4001, 4002
    who = owner
    monkeypatch.setattr(Channel, "peer", lambda self: (os.getpid(), who))

    async def ask(agent: Agent, request: Message) -> Any:
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(RequestHandlers(agent).converse(Channel(theirs)))
        with Control(ours) as control:
            try:
                return await asyncio.to_thread(control.call, request, WAIT_SECONDS)
            except ControlError as error:
                return error
            finally:
                control.close()
                await serving

    async def run() -> None:
        nonlocal who
        agent = Agent(configured_devices(), AgentSettings(), NoSupervisor(), lambda: None)  # type: ignore[arg-type]
        opened = (await ask(agent, OpenSession("n", "k", "python"))).session
        who = stranger
        for request in (
            Restore(opened, "mine"),
            Checkpoint(opened, "theirs"),
            LastCheckpoint(opened),
            SetAutomatic(opened, 1.0, 1),
            Listen(opened),
            Stop(checkpoint=True),
        ):
            assert (await ask(agent, request)).reason == "not-allowed", request
        assert (await ask(agent, CheckpointsRequest())).checkpoints == []
        for unknown in (OpenCheckpoint("mine"), DeleteCheckpoint("mine")):
            assert (await ask(agent, unknown)).reason == "unknown-checkpoint", unknown
        await agent.close()

    asyncio.run(run())
