"""State that is spilled to disk and restored, under a real daemon with toy workers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import CloseSession, Resume, Suspend
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.threads import Cancel, file_lock
from tests.doubles.session.client import ToyClient
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost, from_outside

MIB = 1 << 20
StartHost = Callable[..., ToyHost]


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def cold(host: ToyHost, client: ToyClient) -> SessionView | None:
    found = host.session(client)
    return found if found["tier"] == "cold" else None


def manifests(data_dir: Path) -> list[Path]:
    return sorted(data_dir.glob("states/manifests/*/*.json"))


def chunks(data_dir: Path) -> list[Path]:
    return sorted(data_dir.glob("states/chunks/*/*"))


def no_user_stores(data_dir: Path) -> AbstractContextManager[None]:
    """Block the processes that write to the store."""
    lock = ChunkStore(data_dir / "states").root / "lock"
    return file_lock(lock, shared=False, seconds=0, cancel=Cancel())


def stores(host: ToyHost) -> bool:
    """True if the agent writes to the store, or waits for its lock."""
    return any(each.endswith("states/lock") for each in host.fds())


def test_an_unused_session_is_spilled_and_restored(toy_host: StartHost, data_dir: Path) -> None:
    host = toy_host(cold_after=0.1)
    client = host.client()
    for number in range(3):
        with client.cell():
            client.add(number)
            assert client.read() == client.state
        host.call(Suspend(client.session))
        found = wait_until(lambda: cold(host, client))
        assert (found["state"], found["memory"]) == ("suspended", 0)
        assert found["reason"] == "Saved to disk. Resumes when you run the next cell."
        assert len(manifests(data_dir)) == 1
    client.close()
    wait_until(lambda: manifests(data_dir) == [])
    wait_until(lambda: chunks(data_dir) == [])


def test_a_spilled_state_outlives_the_agent_but_not_the_daemon(
    toy_host: StartHost, data_dir: Path
) -> None:
    host = toy_host(cold_after=0.1)
    client = host.client()
    client.add(1)
    assert client.read() == client.state
    host.call(Suspend(client.session))
    wait_until(lambda: cold(host, client))
    host.kill_agent()
    wait_until(lambda: cold(host, client))
    with client.cell():
        client.add(2)
        assert client.read() == client.state
    host.call(Suspend(client.session))
    wait_until(lambda: cold(host, client))
    host.kill(host.agent_pid(), host.supervisor_pid())
    assert len(manifests(data_dir)) == 1
    toy_host()
    wait_until(lambda: manifests(data_dir) == [])
    wait_until(lambda: chunks(data_dir) == [])


def test_a_described_suspended_session_is_spilled_all_the_same(
    toy_host: StartHost,
) -> None:
    host = toy_host(cold_after=0.001)
    client = host.client()
    for number in range(10):
        client.add(number)
        assert client.read() == client.state
        suspended = threading.Event()

        def ring(suspended: threading.Event = suspended) -> None:
            while not suspended.is_set():
                client.send_bell()

        ringing = threading.Thread(target=ring)
        ringing.start()
        host.call(Suspend(client.session))
        suspended.set()
        ringing.join()
        wait_until(lambda: cold(host, client))
        host.call(Resume(client.session))


def test_the_longest_unused_makes_room_in_host_memory(toy_host: StartHost) -> None:
    host = toy_host(host_memory=1, cold_after=0.0)
    first, second = host.client("first"), host.client("second")
    for client in (first, second):
        host.work(client)
    for client in (first, second):
        host.call(Suspend(client.session))
        wait_until(partial(cold, host, client))
    for client in (second, first):
        assert host.call(Resume(client.session)).session["tier"] == "resident"
        client.add(2)
        assert client.read() == client.state


def test_describing_a_suspended_session_does_not_prevent_its_spill(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(host_memory=1, cold_after=0.0)
    client = host.client()
    client.append(f"wait {tmp_path / 'done'}")
    wait_until(lambda: client.worker.gate_open)
    suspending = threading.Thread(target=from_outside, args=(Suspend(client.session),))
    suspending.start()
    wait_until(lambda: not client.worker.gate_open)  # the suspension has begun
    client.send_bell()
    host.status()  # so the bell was read: the session is reconciled when the suspension has ended
    (tmp_path / "done").touch()
    suspending.join()
    wait_until(lambda: cold(host, client))
    host.call(Resume(client.session))
    assert client.read() == client.state


def test_describing_a_session_during_its_spill_does_not_stop_it(
    toy_host: StartHost, data_dir: Path
) -> None:
    host = toy_host(host_memory=1, cold_after=0.0)
    client = host.client()
    host.work(client)
    with no_user_stores(data_dir):
        host.call(Suspend(client.session))
        wait_until(lambda: stores(host))
        client.send_bell()
        host.status()  # so the bell was read
    wait_until(lambda: cold(host, client))
    host.call(Resume(client.session))
    assert client.read() == client.state


@pytest.mark.parametrize("request_type", [Resume, CloseSession])
def test_a_session_on_its_way_to_disk_does_not_have_to_arrive_there(
    toy_host: StartHost, data_dir: Path, request_type: type[Resume | CloseSession]
) -> None:
    host = toy_host(host_memory=1, cold_after=0.0)
    client = host.client()
    host.work(client)
    with no_user_stores(data_dir):
        host.call(Suspend(client.session))
        wait_until(lambda: stores(host))
        host.call(request_type(client.session))
        if request_type is Resume:
            assert client.read() == client.state


def test_without_a_quota_nothing_is_spilled(toy_host: StartHost, data_dir: Path) -> None:
    host = toy_host(host_memory=1, cold_after=0.01, disk_quota=0)
    client = host.client()
    host.work(client)
    host.call(Suspend(client.session))
    assert host.session(client)["tier"] == "parked"
    assert not (data_dir / "states").exists()
    host.call(Resume(client.session))
    assert client.read() == client.state


def test_a_full_quota_leaves_the_state_where_it_is(toy_host: StartHost) -> None:
    host = toy_host(cold_after=0.01, disk_quota=10)
    client = host.client()
    host.work(client)
    host.call(Suspend(client.session))
    host.call(Resume(client.session))
    assert client.read() == client.state
    host.call(Suspend(client.session))
    assert host.session(client)["tier"] == "parked"


def test_a_session_without_host_memory_and_disk_stays_on_its_device_with_the_reason(
    toy_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_DIRTY", str(128 * MIB))  # the size of a snapshot
    host = toy_host("cpu:1GiB@1", host_memory=64 * MIB, disk_quota=10)
    first, second = host.client("first"), host.client("second")
    host.work(first, 700 * MIB)
    full = r"Host memory for suspended sessions is full \(64.0 MiB\), and so is the disk quota \(10"
    with pytest.raises(ControlError, match=full):
        host.call(Suspend(first.session))
    found = host.session(first)
    assert (found["state"], found["tier"]) == ("idle", "resident")
    waiting = threading.Thread(target=host.work, args=(second, 700 * MIB))
    waiting.start()
    wait_until(lambda: re.search(full, host.session(second)["reason"]))
    assert host.when(second, "queued")
    found = wait_until(lambda: host.when(first, "idle"))
    assert re.match(f"Idle, and stays on its device. {full}", found["reason"])
    first.add(2)
    assert first.read() == first.state  # it continues
    host.call(CloseSession(first.session))
    waiting.join(60)
    assert host.when(second, "idle")


def test_a_damaged_state_is_reported_and_not_waited_for(
    toy_host: StartHost, data_dir: Path
) -> None:
    host = toy_host(cold_after=0.01)
    client = host.client()
    host.work(client)
    host.call(Suspend(client.session))
    wait_until(lambda: cold(host, client))
    moved = [(each, each.with_suffix(".away")) for each in chunks(data_dir)]
    for chunk, away in moved:
        chunk.rename(away)
    with client.cell():
        client.add(2)
        with pytest.raises(RuntimeError, match="on disk and cannot be read"):
            client.read()
    found = host.session(client)
    assert (found["state"], found["tier"]) == ("suspended", "cold")
    for chunk, away in moved:
        away.rename(chunk)
    host.call(Resume(client.session))
    assert client.read() == client.state
