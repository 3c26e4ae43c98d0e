"""Devices that fail: their sessions continue elsewhere, or wait with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from jupyter_sing.cli import commands
from kernelproxy.common.protocol.views import SessionView
from tests.doubles.session.client import ToyClient
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]

TWO = "cpu:256MiB@1,cpu:256MiB@1"
UNCORRECTABLE = 214
FAILED = "Simulated GPU 0 is out of use: several sessions have lost it (CUDA error: 214)."


def lose_first_device(host: ToyHost, tmp_path: Path) -> list[ToyClient]:
    """Let two sessions, which may use the first device only, lose it once each; return them."""
    clients = [host.client(name, device="cpu:0") for name in ("first", "second")]
    for number, client in enumerate(clients):
        client.add(number)
        client.append(f"fault-once {UNCORRECTABLE} {tmp_path / str(number)}")
        client.add(number)
        wait_until((tmp_path / str(number)).exists)
    return clients


def waits_for_its_device(host: ToyHost, client: ToyClient) -> SessionView | None:
    """Return a session's description if it waits, and says that its device has failed."""
    found = host.when(client, "queued")
    return found if found is not None and found["reason"] == FAILED else None


def test_sessions_leave_a_device_that_several_have_lost(
    toy_host: StartHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = toy_host(TWO, engine={})
    other = host.client("other")
    assert host.work(other)["device"] == "cpu:0"
    bound = lose_first_device(host, tmp_path)
    wait_until(lambda: host.status().devices[0]["failure"])
    wait_until(lambda: host.session(other)["worker_pid"] is None)
    other.add(7)
    assert other.read() == other.state
    assert host.session(other)["device"] == "cpu:1"

    for client in bound:
        client.add(7)  # one may have nothing left to do
        waiting = wait_until(partial(waits_for_its_device, host, client))
        assert waiting["worker_pid"] is None
    assert [each["failure"] for each in host.status().devices] == [FAILED, ""]
    assert commands.main(["status"]) == 0
    assert FAILED in capsys.readouterr().out
    assert host.session(host.client("new"))["device"] == "cpu:1"

    host.kill_agent()  # the next one uses it again
    for client in bound:
        assert client.read() == client.state
