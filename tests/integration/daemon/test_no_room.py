"""A device without memory for what was granted: what a worker asks for, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]


def test_a_worker_that_asks_for_room_is_answered_while_it_executes(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host()
    client, other = host.client("asks"), host.client("other")
    host.work(other)
    client.append(f"ask-for-room {tmp_path / 'made'}")
    client.add(1)
    assert client.read() == client.state
    assert (tmp_path / "made").exists()
    assert client.worker.epoch == 1
    host.work(other)


def test_a_session_without_room_to_be_rebuilt_waits_and_loses_nothing(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host()
    client, full = host.client(), tmp_path / "full"
    with client.cell():
        client.add(1)
        client.append(f"room-until {full}")
        client.add(2)
        assert client.read() == client.state
        full.touch()
        assert host.kill_worker(client)
        waits = wait_until(lambda: host.when(client, "queued"))
        assert waits["reason"].startswith("There is too little memory now to rebuild its state.")
        assert waits["reason"].count("othing is lost") == 1
        full.unlink()
        client.add(3)
        assert client.read() == client.state
