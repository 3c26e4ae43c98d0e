"""Workers under a real daemon that die or hang: their sessions are rebuilt, with toy workers."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    Resume,
    Suspend,
)
from tests.doubles.waiting import wait_until
from tests.integration.checkpoints.test_checkpoints import hand_over, host_state
from tests.integration.conftest import ToyHost, from_outside

StartHost = Callable[..., ToyHost]


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_killed_worker_changes_no_result(toy_host: StartHost, moment: str) -> None:
    host = toy_host()
    client = host.client()
    for number in range(100):
        client.add(number)
    if moment == "idle":
        assert client.read() == client.state
    worker = wait_until(lambda: host.session(client)["worker_pid"])
    os.kill(worker, signal.SIGKILL)
    client.add(100)
    assert client.read() == client.state
    wait_until(lambda: host.session(client)["worker_pid"] not in (None, worker))


def test_ten_kills_at_random_moments_change_no_result(toy_host: StartHost) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    host = toy_host(log_bytes=1 << 16, log_budget=1 << 14)
    client = host.client()
    kills = sorted(chance.sample(range(4000), 10))
    for number in range(4000):
        client.add(number)
        if number in kills:
            wait_until(lambda: host.kill_worker(client))
        if number % 500 == 0:
            assert client.read() == client.state, f"seed {seed}"
    assert client.read() == client.state, f"seed {seed}"


def test_sessions_outlive_their_zygote(toy_host: StartHost) -> None:
    host = toy_host()
    clients = [host.client() for _ in range(3)]
    for client in clients:
        host.work(client)
    workers = {host.session(each)["worker_pid"] for each in clients}
    (zygote,) = set(host.children()) - workers
    os.kill(zygote, signal.SIGKILL)
    for client in clients:
        client.add(2)
        assert client.read() == client.state
    wait_until(lambda: zygote not in host.children())


def test_a_call_that_kills_its_worker_three_times_is_skipped(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    client.append("die")
    client.add(2)
    assert client.read() == client.state
    # It stays skipped when the log is replayed.
    wait_until(lambda: host.kill_worker(client))
    client.add(3)
    assert client.read() == client.state


def test_a_call_that_kills_its_worker_twice_is_tried_again(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host()
    client = host.client()
    client.append(f"die-until {tmp_path / 'now'}")
    worker = wait_until(lambda: host.session(client)["worker_pid"])
    (tmp_path / "now").touch()
    client.add(1)
    assert client.read() == client.state
    assert worker is not None


def test_killing_an_idle_worker_again_and_again_skips_nothing(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)

    def has_another(worker: int) -> bool:
        return host.session(client)["worker_pid"] not in (None, worker)

    for _ in range(4):
        worker = wait_until(lambda: host.session(client)["worker_pid"])
        os.kill(worker, signal.SIGKILL)
        wait_until(partial(has_another, worker))
        host.rested(client)
    client.add(2)
    assert client.read() == client.state


def test_a_worker_that_hangs_can_be_suspended(toy_host: StartHost, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    host = toy_host(hurry=str(hurry))
    client = host.client()
    client.add(1)
    client.append("hang")
    wait_until(lambda: host.session(client)["log_consumed"] > 0)
    hurry.touch()  # not before: the worker had to start
    suspending = threading.Thread(target=from_outside, args=(Suspend(client.session),))
    suspending.start()
    while suspending.is_alive():
        host.status()  # answered meanwhile
    suspending.join()
    assert host.session(client)["worker_pid"] is None


def test_a_long_operator_is_not_taken_for_a_fault(toy_host: StartHost, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    host = toy_host(log_bytes=1 << 14, log_budget=1 << 10, hurry=str(hurry))
    client = host.client()
    client.append(f"wait {tmp_path / 'done'}")
    worker = wait_until(lambda: host.session(client)["worker_pid"])
    hurry.touch()  # not before: the worker had to start
    for number in range(100):  # beyond the budget: a snapshot begins and waits
        client.add(number)
    with pytest.raises(TimeoutError):
        client.read(2.0)
    assert host.session(client)["worker_pid"] == worker
    from_outside(Suspend(client.session))  # does not wait for it
    hurry.unlink()
    (tmp_path / "done").touch()
    host.call(Resume(client.session))
    assert client.read() == client.state
    wait_until(lambda: client.agent.snapshots)


def test_a_corrupt_log_ends_that_session_alone(toy_host: StartHost) -> None:
    host = toy_host()
    good, bad = host.client("good"), host.client("bad")
    good.add(1)
    bad.append("corrupt")
    with pytest.raises(RuntimeError, match="Its log is corrupt: position 0: a bad record"):
        bad.read()
    failed = host.session(bad)
    assert (failed["state"], failed["worker_pid"]) == ("failed", None)
    assert good.read() == good.state
    for verb in (Suspend, Resume):
        with pytest.raises(ControlError, match="has ended: Its log is corrupt"):
            host.call(verb(bad.session))


def test_a_session_whose_worker_does_not_start_waits_reports_why_and_loses_nothing(
    toy_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "refuses"
    monkeypatch.setenv("TOY_REFUSE", str(refuses))
    host = toy_host()
    client = host.client()
    host.work(client)
    from_outside(Suspend(client.session))
    refuses.touch()
    with client.cell():
        client.add(2)
        waits = wait_until(lambda: host.when(client, "queued"))
        assert "could not be started: the toy refuses. Nothing is lost. Next" in waits["reason"]
        with pytest.raises(ControlError, match="the toy refuses"):
            host.call(Resume(client.session))
        from_outside(Suspend(client.session))  # and nothing is lost
        host.kill_agent()
    refuses.unlink()
    with client.cell():
        assert client.read() == client.state
    assert host.rested(client)["worker_pid"]


def test_a_session_whose_worker_does_not_start_is_checkpointed_meanwhile(
    toy_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    refuses = tmp_path / "refuses"
    monkeypatch.setenv("TOY_REFUSE", str(refuses))
    host = toy_host()
    client = host.client()
    host.work(client)
    from_outside(Suspend(client.session))
    refuses.touch()
    with pytest.raises(ControlError, match="the toy refuses"):
        host.call(Resume(client.session))
    assert host.session(client)["state"] == "queued"
    made = hand_over(client.session, "one", host_state(client.page.head, b"x"), b"x")
    assert made["name"] == "one"
    refuses.unlink()
    with client.cell():
        assert client.read() == client.state


def test_a_session_whose_device_is_full_at_its_start_waits_and_loses_nothing(
    toy_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "refuses"
    monkeypatch.setenv("TOY_REFUSE", str(refuses))
    host = toy_host()
    client = host.client()
    host.work(client)
    from_outside(Suspend(client.session))
    refuses.write_text("full")
    with client.cell():
        client.add(2)
        waits = wait_until(lambda: host.when(client, "queued"))
        assert "could not be started: CUDA out of memory. Tried to" in waits["reason"]
        assert "Nothing is lost. Next" in waits["reason"]
    refuses.unlink()
    with client.cell():
        assert client.read() == client.state


def test_a_session_tries_again_by_itself(
    toy_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "refuses"
    monkeypatch.setenv("TOY_REFUSE", str(refuses))
    refuses.touch()
    host = toy_host("cpu:256MiB", quantum=0.05)
    client, other = host.client("waits"), host.client("other")
    client.add(1)
    wait_until(lambda: host.when(client, "queued"))
    refuses.unlink()
    host.work(other)  # the waiting session holds neither a turn nor memory
    assert client.read() == client.state
