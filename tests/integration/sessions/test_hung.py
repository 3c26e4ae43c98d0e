"""Workers that hang and kernels that vanish keep no device, and no lease is lost or left over.

The scheduler decides, with toy workers. A worker reports a corrupt log if another one executes at
the same moment (``TOY_ALONE``), which ends its session.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jupyter_sing.controller import decision_log
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import MigrateRequest
from tests.doubles.session.client import ToyClient
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost, kill_at_once, lives

MIB = 1 << 20
Start = Callable[..., ToyHost]


@pytest.fixture
def start(
    toy_host: Callable[..., ToyHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Return a function that starts a daemon with short turns and a short watchdog timeout."""
    monkeypatch.setenv("TOY_ALONE", str(tmp_path / "alone"))
    monkeypatch.setenv("TOY_SLOW", str(tmp_path / "slow"))
    engine = {"quanta": [0.05] * 4, "run_min_switches": 0.0}

    def start(devices: str = "cpu:1GiB@1", **settings: object) -> ToyHost:
        given = {"still_seconds": 1.0, "engine": engine, **settings}
        return toy_host(devices, audit=str(tmp_path / "audit"), **given)

    return start


def audit(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "audit").read_text())
    assert found["wrong"] == []
    return found


def check_no_lease_is_left(host: ToyHost, tmp_path: Path, *clients: ToyClient) -> None:
    """Wait until all are idle, and no session holds a lease."""

    def rests(client: ToyClient) -> bool:
        return host.session(client)["state"] in ("idle", "suspended")

    for each in clients:
        wait_until(partial(rests, each))
    wait_until(lambda: not audit(tmp_path)["engine"] and not audit(tmp_path)["agent"])


def check_both_continue(host: ToyHost, tmp_path: Path, *clients: ToyClient) -> None:
    for each in clients:
        with each.cell():
            each.add(7)
            assert each.read() == each.state
    check_no_lease_is_left(host, tmp_path, *clients)


def said(name: str, text: str) -> bool:
    try:
        return any(
            text in each.reason for each in decision_log.read(paths.runtime_dir(), name, 1000)
        )
    except ControlError:  # nothing is written down yet
        return False


def test_a_stopped_worker_gives_way(start: Start, tmp_path: Path) -> None:
    host = start()
    first, second = host.client("first"), host.client("second")
    with first.cell():
        first.add(1)
        first.append(f"wait {tmp_path / 'go-on'}")
        first.add(2)
        wait_until((tmp_path / "go-on.begun").exists)
        worker = existing(host.session(first)["worker_pid"])
        os.kill(worker, signal.SIGSTOP)
        with second.cell():
            second.add(3)
            assert second.read() == second.state
            assert not lives(worker)
            (tmp_path / "go-on").touch()
            assert first.read() == first.state
    check_both_continue(host, tmp_path, first, second)
    wait_until(lambda: said("first", "was stopped by a signal while others waited for 1 s"))


def test_a_stopped_worker_without_waiters_is_rebuilt(start: Start, tmp_path: Path) -> None:
    host = start(still_seconds=0.1)
    client = host.client("alone")
    client.append(f"wait {tmp_path / 'go-on'}")
    wait_until((tmp_path / "go-on.begun").exists)
    os.kill(existing(host.session(client)["worker_pid"]), signal.SIGSTOP)
    (tmp_path / "go-on").touch()
    client.add(1)
    assert client.read() == client.state
    check_no_lease_is_left(host, tmp_path, client)
    wait_until(lambda: said("alone", "was stopped by a signal for 1.2 s"))


@pytest.mark.parametrize(
    ("verb", "text"),
    [("hang-until", "did nothing while others"), ("spin-until", "One operation kept others")],
)
def test_a_worker_that_comes_to_no_end_gives_way(
    start: Start, tmp_path: Path, verb: str, text: str
) -> None:
    host = start(busy_seconds=2.0)
    first, second = host.client("first"), host.client("second")
    with first.cell():
        first.add(1)
        first.append(f"{verb} {tmp_path / 'go-on'}")
        first.add(2)
        wait_until((tmp_path / "go-on.begun").exists)
        worker = existing(host.session(first)["worker_pid"])
        with second.cell():
            second.add(3)
            assert second.read() == second.state
        assert not lives(worker)
        (tmp_path / "go-on").touch()
        # It may hang in another worker by now, whose end is not waited for.
        kill_at_once(wait_until(lambda: host.session(first)["worker_pid"]))
        assert first.read() == first.state
    check_both_continue(host, tmp_path, first, second)
    wait_until(lambda: said("first", text))


def test_a_stopped_worker_that_rests_gives_its_memory(start: Start, tmp_path: Path) -> None:
    host = start("cpu:256MiB@1")
    first, second = host.client("first"), host.client("second")
    host.work(first, 150 * MIB)
    worker = existing(host.session(first)["worker_pid"])
    os.kill(worker, signal.SIGSTOP)
    host.work(second, 150 * MIB)
    assert not lives(worker)
    check_both_continue(host, tmp_path, first, second)


def test_a_worker_that_hangs_before_it_is_ready_gives_way(start: Start, tmp_path: Path) -> None:
    host = start()
    first, second = host.client("first"), host.client("second")
    host.work(second)
    slow = tmp_path / "slow"
    slow.touch()
    before = set(host.children())
    with first.cell():
        first.add(1)
        wait_until(lambda: host.when(first, "restoring"))
        (worker,) = wait_until(lambda: set(host.children()) - before)
        os.kill(worker, signal.SIGSTOP)
        with second.cell():
            second.add(2)
            wait_until(lambda: not lives(worker))
            slow.unlink()
            assert second.read() == second.state
            assert first.read() == first.state
    check_both_continue(host, tmp_path, first, second)


MOMENTS = ["granted", "waiting", "stopping", "loading"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", ["kernel", "worker", "agent"])
def test_whatever_dies_leaves_the_device_to_others(
    start: Start, tmp_path: Path, what: str, moment: str
) -> None:
    host = start()
    first, second, third = (host.client(name) for name in ("first", "second", "third"))
    go_on, slow = tmp_path / "go-on", tmp_path / "slow"
    host.work(second)
    host.work(third)
    before = set(host.children())
    if moment == "waiting":
        host.work(first)
        second.append(f"wait {go_on}")
        wait_until((tmp_path / "go-on.begun").exists)
        first.add(1)
        wait_until(lambda: host.when(first, "queued"))
    elif moment == "loading":
        slow.touch()
        first.add(1)
        wait_until(lambda: host.when(first, "restoring"))
        wait_until(lambda: set(host.children()) - before)
    else:
        first.append(f"wait {go_on}")
        wait_until((tmp_path / "go-on.begun").exists)
    if moment in ("stopping", "loading"):
        second.add(2)
        wait_until(lambda: host.when(second, "queued"))
    if what == "kernel":
        host.clients.remove(first)
        first.close()
    elif what == "agent":
        host.kill_agent()
    elif moment == "loading":
        kill_at_once(*(set(host.children()) - before))
    else:
        kill_at_once(existing(host.session(first)["worker_pid"]))
    if moment == "loading" and what == "kernel":
        assert second.read() == second.state  # no session waits for it
    slow.unlink(missing_ok=True)
    third.add(3)
    if what == "kernel" and moment in ("granted", "stopping"):
        assert third.read() == third.state
    go_on.touch()
    rest = [second, third] if what == "kernel" else [first, second, third]
    check_both_continue(host, tmp_path, *rest)
    assert len(host.status().sessions) == len(rest)
    if what == "kernel":
        wait_until(lambda: set(host.children()) <= before)


def test_a_session_that_is_moved_in_mid_turn_has_its_turn_where_it_is(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOY_ALONE")  # there are two devices
    host = start("cpu:1GiB@1,cpu:1GiB@1")
    first, second = host.client("first"), host.client("second", device="cpu:1")
    host.work(second)
    with first.cell(), second.cell():
        for number in range(6):
            target = f"cpu:{1 - number % 2}"
            first.add(number)
            second.add(number)
            assert host.call(MigrateRequest(first.session, target)).session["device"] == target
            first.add(number)
            assert first.read() == first.state
            assert second.read() == second.state
            assert audit(tmp_path)["wrong"] == []
    check_both_continue(host, tmp_path, first, second)
