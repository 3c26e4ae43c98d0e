"""Sessions below other sessions, and jobs of several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    CloseSession,
    JoinJob,
    OpenSession,
    Prepare,
    SetDeterministic,
    SetPriority,
)
from kernelproxy.common.protocol.views import SessionView
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost, from_outside

ROOT = Path(__file__).parents[3]
StartHost = Callable[..., ToyHost]


def by_name(host: ToyHost) -> dict[str, SessionView]:
    return {each["name"]: each for each in host.status().sessions}


def place(session: SessionView) -> tuple[str, int | None, int | None]:
    return session["job"], session["rank"], session["ranks"]


def ids(host: ToyHost) -> set[str]:
    return {each["id"] for each in host.status().sessions}


def test_a_child_inherits_from_its_parent(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB,cpu:1GiB", engine={})
    parent = host.open(
        "a.ipynb", notebook="/home/a.ipynb", device="cpu:1", user="ada", idle_timeout=7.0
    )
    host.call(SetPriority(parent, "basic"))
    host.call(SetDeterministic(parent, True))
    host.open("rank", kernel_id="", script=True, parent=parent)
    found = by_name(host)["rank"]
    assert (found["parent"], found["owner"], found["device"]) == (parent, "ada", "cpu:1")
    assert (found["priority"], found["pinned"]) == ("basic", False)
    exactness = found.get("exactness")
    assert exactness is not None
    assert exactness["deterministic"]
    assert by_name(host)["a.ipynb"]["parent"] == ""


def test_a_child_of_a_notebook_on_any_device_may_be_on_another_one(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB,cpu:1GiB")
    parent = host.open("a.ipynb")
    host.open("rank", script=True, parent=parent)
    assert {each["device"] for each in host.status().sessions} == {"cpu:0", "cpu:1"}


def test_children_end_with_their_parent_and_theirs_with_them(toy_host: StartHost) -> None:
    host = toy_host()
    parent, other = host.client("a.ipynb"), host.open("b.ipynb")
    child = host.client("rank", script=True, parent=parent.session)
    below = host.open("below", script=True, parent=child.session)
    assert ids(host) == {parent.session, child.session, below, other}
    host.call(CloseSession(parent.session))
    wait_until(lambda: ids(host) == {other})
    with pytest.raises(RuntimeError, match="the process that started it has ended"):
        child.read()


def test_a_child_of_a_session_that_has_ended_is_refused(toy_host: StartHost) -> None:
    host = toy_host()
    parent = host.open("a.ipynb")
    host.call(CloseSession(parent))
    with pytest.raises(ControlError, match="has ended, so this one gets none") as raised:
        host.open("rank", script=True, parent=parent)
    assert raised.value.reason == "ended"
    assert not ids(host)


def test_a_child_ends_with_its_own_process_and_leaves_its_parent(toy_host: StartHost) -> None:
    host = toy_host()
    parent = host.open("a.ipynb")
    from_outside(OpenSession("rank", "", sys.executable, script=True, parent=parent))
    wait_until(lambda: ids(host) == {parent})


def test_a_session_joins_a_job_and_then_another_one(toy_host: StartHost) -> None:
    host = toy_host()
    ranks = [host.open(f"rank {number}", script=True) for number in range(2)]
    assert place(by_name(host)["rank 1"]) == ("", None, None)
    for number, session in enumerate(ranks):
        for _ in range(2):
            host.call(JoinJob(session, "run:29500/0", number, 2))
    assert place(by_name(host)["rank 0"]) == ("run:29500/0", 0, 2)
    assert place(by_name(host)["rank 1"]) == ("run:29500/0", 1, 2)
    host.call(JoinJob(ranks[0], "later", 0, 1))
    assert place(by_name(host)["rank 0"]) == ("later", 0, 1)


def test_a_session_joins_no_job_as_an_invalid_rank(toy_host: StartHost) -> None:
    host = toy_host()
    session = host.open("rank")
    with pytest.raises(ControlError, match="Rank 2 of 2 is none") as raised:
        host.call(JoinJob(session, "run", 2, 2))
    assert raised.value.reason == "bad-request"
    assert place(by_name(host)["rank"]) == ("", None, None)


def test_a_session_that_has_ended_joins_no_job(toy_host: StartHost) -> None:
    host = toy_host()
    with pytest.raises(ControlError, match="There is no session") as raised:
        host.call(JoinJob("gone", "run", 0, 1))
    assert raised.value.reason == "unknown-session"


def test_families_and_jobs_outlive_the_agent(toy_host: StartHost) -> None:
    host = toy_host()
    parent = host.client("a.ipynb")
    child = host.client("rank", script=True, parent=parent.session)
    host.call(JoinJob(child.session, "run", 1, 4))
    host.kill_agent()
    found = by_name(host)["rank"]
    assert (found["parent"], place(found)) == (parent.session, ("run", 1, 4))
    child.add(1)
    assert child.read() == child.state
    host.call(CloseSession(parent.session))
    wait_until(lambda: not ids(host))


def test_a_child_whose_parent_is_not_recovered_ends(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB,cpu:1GiB", devices_after="cpu:1GiB")
    parent = host.client("a.ipynb", device="cpu:1")
    child = host.client("rank", script=True, parent=parent.session, device="cpu:0")
    assert {each["device"] for each in host.status().sessions} == {"cpu:0", "cpu:1"}
    host.kill_agent()
    wait_until(lambda: not ids(host))
    with pytest.raises(RuntimeError, match="the process that started it has ended"):
        child.read()


def test_a_child_that_is_killed_right_after_it_has_opened_leaves_nothing(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    parent = host.open("a.ipynb")
    program = (
        "import os, signal, sys\n"
        "from kernelproxy.kernel.activation import child_session\n"
        f"print(child_session.open_session({parent!r}), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "SING_SOCKET": str(paths.socket_path()),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() not in ("", parent), done.stderr
    wait_until(lambda: ids(host) == {parent})


def test_ranks_that_may_not_use_devices_are_refused_before_they_start(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    host.call(Prepare(sys.executable, ranks=2))
    with pytest.raises(ControlError, match="There is no device cpu:7"):
        host.call(Prepare(sys.executable, ranks=2, device="cpu:7"))


def test_a_process_that_waits_learns_that_its_session_has_ended(toy_host: StartHost) -> None:
    host = toy_host()
    parent = host.open("a.ipynb")
    child = host.client("rank", script=True, parent=parent)
    child.add(1)
    assert child.read() == child.state
    host.call(CloseSession(parent))
    child.wait_hung_up()
