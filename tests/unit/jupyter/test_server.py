"""The server extension: REST as specified, authorized, and outside the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from tornado.httpclient import HTTPClientError

from jupyter_sing.controller import policy_file
from jupyter_sing.server import handler, routes
from jupyter_sing.server.extension import SingExtension
from jupyter_sing.server.notebooks import NotebookNames, contents_path
from kernelproxy.agent.status.activity_store import ActivityStore
from kernelproxy.agent.status.session_status import outline
from kernelproxy.agent.status.timeline import Change
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import Checkpoint
from kernelproxy.provisioning.events import EVENT_ID
from tests.unit.fake_daemon import (
    AFFECTED,
    CHECKPOINT,
    DAMAGED,
    DEVICE,
    MIGRATION,
    NOTES,
    OUTCOME,
    SECONDS_MAX,
    SESSION,
    FakeDaemon,
)

pytest_plugins = ["pytest_jupyter.jupyter_server"]

API = "jupyter-sing/api"
OPENAPI = yaml.safe_load((Path(routes.__file__).parent / "openapi.yaml").read_text())
VERBS = ("get", "post", "put", "delete", "patch")


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {"ServerApp": {"jpserver_extensions": {"jupyter_sing": True}}}


async def test_lists_are_empty_without_a_daemon(runtime_dir: Path, jp_fetch: Any) -> None:
    for path in ("devices", "sessions"):
        assert json.loads((await jp_fetch(API, path)).body) == []
    nothing: dict[str, Any] = {"devices": [], "sessions": [], "sharing": {}}
    assert json.loads((await jp_fetch(API, "status")).body) == nothing
    assert not (runtime_dir / "agent.sock").exists()


async def test_devices_and_sessions_are_listed(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    assert json.loads((await jp_fetch(API, "devices")).body) == [DEVICE]
    assert json.loads((await jp_fetch(API, "sessions")).body) == [SESSION]
    assert json.loads((await jp_fetch(API, "sessions", SESSION["id"])).body) == SESSION


async def test_replies_have_the_fields_of_openapi(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    schemas = OPENAPI["components"]["schemas"]
    (device,) = json.loads((await jp_fetch(API, "devices")).body)
    (session,) = json.loads((await jp_fetch(API, "sessions")).body)
    optional = {"outside"}  # of GPUs
    assert set(device) == set(schemas["Device"]["required"])
    assert set(device) == set(schemas["Device"]["properties"]) - optional
    assert set(session) == set(schemas["Session"]["properties"])
    checkpoint, damaged = json.loads((await jp_fetch(API, "checkpoints")).body)
    assert set(checkpoint) | set(damaged) == set(schemas["Checkpoint"]["properties"])
    assert set(checkpoint["omitted"][0]) == set(schemas["Omission"]["properties"])


async def test_suspend_and_resume_emit_events(
    fake_daemon: FakeDaemon, jp_fetch: Any, jp_serverapp: Any
) -> None:
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def listen(logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        events.put_nowait(data)

    async def next_event() -> dict[str, Any]:
        return await asyncio.wait_for(events.get(), SECONDS_MAX)

    jp_serverapp.event_logger.add_listener(schema_id=EVENT_ID, listener=listen)
    (app,) = jp_serverapp.extension_manager.extension_apps["jupyter_sing"]
    await app._start_jupyter_server_extension(jp_serverapp)
    try:
        assert (await next_event())["state"] == "idle"
        for verb, state in (("suspend", "suspended"), ("resume", "idle")):
            reply = await jp_fetch(API, "sessions", SESSION["id"], verb, method="POST", body="")
            assert json.loads(reply.body)["state"] == state
            event = await next_event()
            assert (event["session"], event["state"]) == (SESSION["id"], state)
    finally:
        await app.stop_extension()
    await app.stop_extension()  # idempotent


async def test_activity_has_the_fields_of_openapi_and_names_of_notebooks(
    fake_daemon: FakeDaemon, jp_fetch: Any, runtime_dir: Path
) -> None:
    empty = json.loads((await jp_fetch(API, "activity")).body)
    assert (empty["devices"], empty["events"]) == ([], [])
    assert 86_000 < empty["until"] - empty["since"] < 87_000
    now = time.time()
    record = ActivityStore(runtime_dir)
    record.begin(now - 50, [("cpu:0", "software", 1 << 30)], kept=False)
    for session in (SESSION["id"], "ended"):
        record.opened(session, os.getuid(), "ada", "kernel-1")
        record.changed(Change(now - 40, session, "cpu:0", "running"))
        record.happened(now - 30, "suspended", session, "cpu:0", "Not used.")
    record.close(now)
    found = json.loads((await jp_fetch(API, "activity", params={"since": f"{now - 60}"})).body)
    Draft202012Validator(resolved(OPENAPI["components"]["schemas"]["Activity"])).validate(found)
    (device,) = found["devices"]
    assert {e["session"]: e["name"] for e in device["held"]} == {
        SESSION["id"]: SESSION["name"], "ended": "kernel-1",
    }  # fmt: skip
    assert {each["name"] for each in found["events"]} == {SESSION["name"], "kernel-1"}
    for query in ({"since": "x"}, {"since": "-1"}, {"since": "inf"}, {"resolution": "nan"}):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(API, "activity", params=query)
        assert refused.value.code == 400
        assert refused.value.response is not None
        assert json.loads(refused.value.response.body)["reason"] == "bad-request"


def resolved(schema: Any) -> Any:
    """Return the schema with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [resolved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if found := schema.get("$ref"):
        return resolved(OPENAPI["components"]["schemas"][found.rsplit("/", 1)[1]])
    return {name: resolved(each) for name, each in schema.items()}


async def test_status_has_devices_sessions_and_sharing(
    fake_daemon: FakeDaemon, jp_fetch: Any
) -> None:
    found = json.loads((await jp_fetch(API, "status")).body)
    assert found == {"devices": [DEVICE], "sessions": [SESSION], "sharing": {}}
    assert set(found) == set(OPENAPI["components"]["schemas"]["Status"]["properties"])


async def test_migrate_moves_a_session_to_the_device_of_the_body(
    fake_daemon: FakeDaemon, jp_fetch: Any
) -> None:
    path = (API, "sessions", SESSION["id"], "migrate")
    reply = await jp_fetch(*path, method="POST", body='{"device": "cpu:1"}')
    assert json.loads(reply.body)["migration"] == MIGRATION
    for body, code in (
        ("", 400),
        ("[]", 400),
        ("{}", 400),
        ('{"device": 1}', 400),
        ("{", 400),
        ('{"device": "cpu:9"}', 404),
    ):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(*path, method="POST", body=body)
        assert refused.value.code == code, body


async def test_pin_and_priority_are_set(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    path = (API, "sessions", SESSION["id"])
    for verb, pinned in (("pin", True), ("pin", True), ("unpin", False)):
        reply = await jp_fetch(*path, verb, method="POST", body="")
        assert json.loads(reply.body)["pinned"] is pinned
    reply = await jp_fetch(*path, "priority", method="POST", body='{"level": "basic"}')
    assert json.loads(reply.body)["priority"] == "basic"
    for body, code in (
        ("", 400),
        ('{"level": 1}', 400),
        ('{"level": "best"}', 400),
        ('{"level": "premium"}', 403),
    ):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(*path, "priority", method="POST", body=body)
        assert refused.value.code == code, body


async def test_deterministic_algorithms_are_switched(
    fake_daemon: FakeDaemon, jp_fetch: Any
) -> None:
    path = (API, "sessions", SESSION["id"], "deterministic")
    for on in (True, False):
        reply = await jp_fetch(*path, method="POST", body=json.dumps({"on": on}))
        assert json.loads(reply.body)["exactness"]["deterministic"] is on
    for body in ("", "[]", "{}", '{"on": "yes"}', '{"on": 1}'):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(*path, method="POST", body=body)
        assert refused.value.code == 400, body


async def test_notebook_is_saved_and_restored(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    path = (API, "sessions", SESSION["id"])
    for body, name in (("", "before-lunch"), ('{"name": "mine"}', "mine")):
        reply = await jp_fetch(*path, "checkpoint", method="POST", body=body)
        assert json.loads(reply.body) == CHECKPOINT | {"name": name}
    nowhere = {"path": ""}
    found = json.loads((await jp_fetch(API, "checkpoints")).body)
    assert found == [CHECKPOINT | nowhere, DAMAGED | nowhere]
    assert json.loads((await jp_fetch(API, "checkpoints", "torn")).body) == DAMAGED | nowhere
    reply = await jp_fetch(*path, "restore", method="POST", body='{"name": "before-lunch"}')
    assert json.loads(reply.body) == OUTCOME
    reply = await jp_fetch(API, "checkpoints", "before-lunch", method="DELETE")
    assert (reply.code, reply.body) == (204, b"")
    for arguments, options, code in (
        (("checkpoints", "none"), {}, 404),
        (("checkpoints", "none"), {"method": "DELETE"}, 404),
        (("sessions", SESSION["id"], "restore"), {"method": "POST", "body": ""}, 400),
        (
            ("sessions", SESSION["id"], "restore"),
            {"method": "POST", "body": '{"name": "none"}'},
            404,
        ),
        (("checkpoints", "..%2Fetc"), {}, 404),
    ):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(API, *arguments, **options)
        assert refused.value.code == code, arguments


async def test_checkpoint_waits_for_a_starting_kernel(
    fake_daemon: FakeDaemon, jp_fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = (API, "sessions", SESSION["id"])
    for verb, found in (("restore", OUTCOME), ("checkpoint", CHECKPOINT)):
        fake_daemon.too_early = 2
        body = '{"name": "before-lunch"}'
        assert json.loads((await jp_fetch(*path, verb, method="POST", body=body)).body) == found
    monkeypatch.setattr(handler, "CONNECT_SECONDS_MAX", 0.0)
    fake_daemon.too_early = 9
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(*path, "checkpoint", method="POST", body="")
    assert refused.value.code == 503


async def test_waiting_verbs_do_not_block_other_requests(
    fake_daemon: FakeDaemon,
    jp_fetch: Any,
    jp_base_url: str,
    jp_http_port: int,
    jp_auth_header: dict[str, str],
) -> None:
    many = 50  # more than there are threads, of the server and of ours
    fake_daemon.busy = True
    path = f"{jp_base_url}{API}/sessions/{SESSION['id']}/checkpoint"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    lines = [f"{name}: {value}\r\n" for name, value in jp_auth_header.items()]
    asked = "".join([head, *lines, "Content-Length: 0\r\n\r\n"]).encode()
    waiting = []
    for _ in range(many):
        _, writer = await asyncio.open_connection("localhost", jp_http_port)
        writer.write(asked)
        waiting.append(writer)
    async with asyncio.timeout(SECONDS_MAX):
        while sum(isinstance(each, Checkpoint) for each in fake_daemon.requests) < many:
            await asyncio.sleep(0.01)
        assert json.loads((await jp_fetch(API, "status")).body)["devices"] == [DEVICE]
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, lambda: "free") == "free"
        made = json.loads((await jp_fetch("api", "kernels", method="POST", body="{}")).body)
        await jp_fetch("api", "kernels", made["id"], method="DELETE")
        # The daemon is notified when the caller disconnects.
        for each in waiting:
            each.close()
        for _ in range(many):
            assert await asyncio.to_thread(fake_daemon.disconnected.acquire, timeout=SECONDS_MAX)


async def test_checkpoint_names_may_contain_special_characters(
    fake_daemon: FakeDaemon, jp_fetch: Any
) -> None:
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(API, "checkpoints", "ada@noon+1")
    body = refused.value.response.body if refused.value.response else b""
    assert json.loads(body)["message"] == "There is no checkpoint 'ada@noon+1'."


def test_paths_of_notebooks_are_relative_to_the_servers_root() -> None:
    assert contents_path("/home/ada/lessons/digits.ipynb", "/home/ada") == "lessons/digits.ipynb"
    for notebook, root in (
        ("/home/eve/digits.ipynb", "/home/ada"),
        ("/home/ada/../eve/digits.ipynb", "/home/ada"),
        ("/home/ada/digits.ipynb", ""),
        ("digits.ipynb", "/home/ada"),
        ("", "/home/ada"),
    ):
        assert contents_path(notebook, root) == "", notebook


async def test_refusal_has_message_and_reason(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    for arguments, options in (
        (("sessions", "nobody"), {}),
        (("sessions", "nobody", "suspend"), {"method": "POST", "body": ""}),
    ):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(API, *arguments, **options)
        assert refused.value.code == 404
        assert refused.value.response is not None
        found = json.loads(refused.value.response.body)
        assert found == {"message": "There is no session nobody.", "reason": "unknown-session"}


@pytest.mark.parametrize("place", ["migrate", "checkpoint", "restore"])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"device": "\xff", "name": "\xff"}', "The body must be UTF-8."),
        (b"[" * 200_000, "Invalid JSON in body of request"),
    ],
    ids=["bytes", "depth"],
)
async def test_unreadable_body_is_refused_with_a_sentence(
    fake_daemon: FakeDaemon, jp_fetch: Any, place: str, body: bytes, why: str
) -> None:
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(API, "sessions", SESSION["id"], place, method="POST", body=body)
    assert refused.value.code == 400
    assert refused.value.response is not None
    assert json.loads(refused.value.response.body)["message"] == why


async def test_verbs_without_a_daemon_are_unavailable(runtime_dir: Path, jp_fetch: Any) -> None:
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(API, "sessions", "any", "suspend", method="POST", body="")
    assert refused.value.code == 503


async def test_checkpoints_are_listed_without_a_running_daemon(
    fake_daemon: FakeDaemon, jp_fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []

    def connect_noting(start: bool = True) -> Any:
        started.append(start)
        return connect(start=False)  # the fake one

    monkeypatch.setattr(handler, "connect", connect_noting)
    await jp_fetch(API, "checkpoints")
    await jp_fetch(API, "checkpoints", CHECKPOINT["name"])
    await jp_fetch(API, "checkpoints", CHECKPOINT["name"], method="DELETE")
    assert started == [True, True, True]
    await jp_fetch(API, "sessions")
    assert started[3:] == [False]


async def test_metrics_have_prometheus_format(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    text = (await jp_fetch(API, "metrics")).body.decode()
    assert 'sing_device_memory_used_bytes{device="cpu:0"} 3.145728e+06' in text
    assert 'sing_sessions{state="idle"} 1.0' in text
    assert 'sing_session_operators_total{session="0123abcd"} 1234.0' in text
    named = re.findall(r"^# HELP (\w+)", text, re.MULTILINE)
    assert named
    assert all(name.startswith("sing_") for name in named)


async def test_metrics_count_jobs_of_several_ranks(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    places = [("a", 0, 2), ("a", 1, 2), ("b", 0, 1), ("c", 0, 3), ("", None, None)]
    fake_daemon.sessions = {
        str(number): SESSION | {"id": str(number), "job": job, "rank": rank, "ranks": ranks}
        for number, (job, rank, ranks) in enumerate(places)
    }
    text = (await jp_fetch(API, "metrics")).body.decode()
    assert "sing_jobs 2.0" in text


async def test_metrics_omit_blank_fields_of_other_users(
    fake_daemon: FakeDaemon, jp_fetch: Any
) -> None:
    fake_daemon.sessions = {"4567cdef": outline(SESSION | {"id": "4567cdef"})}
    text = (await jp_fetch(API, "metrics")).body.decode()
    assert 'sing_session_memory_bytes{session="4567cdef"} 3.145728e+06' in text
    assert "sing_session_gpu_seconds_total{" not in text


async def test_requests_with_a_wrong_token_are_refused(
    fake_daemon: FakeDaemon, jp_fetch: Any
) -> None:
    before = len(fake_daemon.requests)
    for path, verbs in OPENAPI["paths"].items():
        for verb in VERBS:
            if verb not in verbs:
                continue
            path = path.replace("{id}", SESSION["id"]).replace("{name}", CHECKPOINT["name"])
            parts = path.strip("/").split("/")
            body = "" if verb in ("post", "put") else None
            with pytest.raises(HTTPClientError) as refused:
                await jp_fetch(
                    API,
                    *parts,
                    method=verb.upper(),
                    body=body,
                    headers={"Authorization": "token x"},
                )
            assert refused.value.code == 403, path
    assert len(fake_daemon.requests) == before


async def test_policy_is_shown_and_replaced(fake_daemon: FakeDaemon, jp_fetch: Any) -> None:
    text = "virtual_clusters: {lab: {users: [{name: ada, weight: 2}]}}"
    outcome = {"affected": [AFFECTED], "notes": NOTES}
    for query, body, message, holds in (
        ({"dry_run": "1"}, json.dumps({"policy": text}), "Nothing was applied.", ""),
        ({}, json.dumps({"policy": text}), "The policy is applied.", text),
        ({"dry_run": "0"}, "{}", "The policy is applied.", "{}"),  # YAML, of which JSON is a subset
        ({}, text, "The policy is applied.", text),
    ):
        reply = await jp_fetch(API, "policy", method="PUT", params=query, body=body)
        assert json.loads(reply.body) == {"message": message, **outcome}
        assert json.loads((await jp_fetch(API, "policy")).body) == {"policy": holds}
    properties = OPENAPI["components"]["schemas"]["Difference"]["properties"]
    assert set(AFFECTED) == set(properties)
    for refusable, reason in (
        ('{"policy": "defaults: {wieght: 2}"}', "bad-policy"),
        (b"\xff", "bad-policy"),
        ("", "bad-request"),
        ('{"policy": " "}', "bad-request"),
        ("[" * 200_000, "bad-policy"),
        (f"# {'x' * (20 << 20)}", "bad-policy"),
    ):
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch(API, "policy", method="PUT", body=refusable)
        assert refused.value.code == 400
        assert refused.value.response is not None
        assert json.loads(refused.value.response.body)["reason"] == reason


async def test_policy_without_a_daemon_is_the_last_applied(
    runtime_dir: Path, jp_fetch: Any
) -> None:
    assert json.loads((await jp_fetch(API, "policy")).body) == {"policy": ""}
    policy_file.keep(runtime_dir, "defaults: {weight: 2}")
    assert json.loads((await jp_fetch(API, "policy")).body) == {"policy": "defaults: {weight: 2}"}
    assert not (runtime_dir / "agent.sock").exists()


async def test_authorizer_receives_the_resource_jupyter_sing(
    fake_daemon: FakeDaemon, jp_fetch: Any, jp_serverapp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def is_authorized(handler: Any, user: Any, action: str, resource: str) -> bool:
        asked.append((action, resource))
        return False

    monkeypatch.setattr(jp_serverapp.authorizer, "is_authorized", is_authorized)
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(API, "sessions", SESSION["id"], "suspend", method="POST", body="")
    assert refused.value.code == 403
    with pytest.raises(HTTPClientError):
        await jp_fetch(API, "sessions")
    assert asked == [("write", "jupyter_sing"), ("read", "jupyter_sing")]


def test_handlers_are_those_of_openapi() -> None:
    def plain(pattern: str) -> set[str]:
        pattern = pattern.replace("([0-9A-Za-z_-]+)", "{id}")
        pattern = pattern.replace("([0-9A-Za-z._@+%-]+)", "{name}")
        found = re.search(r"\(([a-z|]+)\)", pattern)
        if not found:
            return {f"/{pattern}"}
        return {f"/{pattern.replace(found[0], word)}" for word in found[1].split("|")}

    handled = {
        (path, verb)
        for pattern, route_handler in routes.ROUTES
        for path in plain(pattern)
        for verb in VERBS
        if verb in vars(route_handler)
    }
    described = {
        (path, verb) for path, verbs in OPENAPI["paths"].items() for verb in verbs if verb in VERBS
    }
    assert handled == described


def test_only_configured_options_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    SingExtension().initialize_settings()
    assert not {"JUPYTER_SING_IDLE_TIMEOUT", "JUPYTER_SING_POLICY"} & set(os.environ)
    SingExtension(idle_timeout=5.0, policy="/etc/lab.yaml").initialize_settings()
    assert os.environ["JUPYTER_SING_IDLE_TIMEOUT"] == "5.0"
    assert os.environ["JUPYTER_SING_POLICY"] == "/etc/lab.yaml"
    assert SingExtension().policy == "/etc/lab.yaml"


async def test_sessions_have_the_names_of_their_notebooks() -> None:
    class SessionManager:
        async def list_sessions(self) -> list[dict[str, Any]]:
            return [
                {"kernel": {"id": "k-1"}, "path": "lessons/digits.ipynb"},
                {"kernel": None, "path": "dead.ipynb"},
            ]

    named = await NotebookNames(SessionManager()).name([SESSION, SESSION | {"kernel_id": ""}])
    assert [each["name"] for each in named] == ["lessons/digits.ipynb", "digits.ipynb"]
    assert SESSION["name"] == "digits.ipynb"
